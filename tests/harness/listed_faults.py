"""The faults of docs/faults.md: where each is planted, and the words that its refusal must have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FAULTS = Path(__file__).parent / "faults"


def planted() -> dict[str, str]:
    """Each fault's name and its function as ``file.py:function``; a function ``attention`` has the name of its file."""
    found, function = {}, re.compile(r"^def ([a-z]\w*)\((?:q, k, v, causal=False|x|outs)\b", re.MULTILINE)
    for path in sorted(FAULTS.rglob("*.py")):
        folder = "gpu/" if path.parent.name == "gpu" else ""
        for name in function.findall(path.read_text(encoding="utf-8")):
            found[folder + (path.stem if name == "attention" else name)] = f"{path}:{name}"
    return found


PLANTED = planted()

ATTENTION = "attn b1 h2 q70 d16 fp32 causal"  # 70: no tile divides it
UNEQUAL = "attn b1 h2 q24 k40 d16 fp32 causal"
GROUPED = "attn b1 h4 hk2 q70 d16 fp32 causal"
GRADIENTS = "attnbwd b1 h4 hk2 q70 d16 fp32 causal"
EXPERTS = "moe t50 e6 k2 d32 f24 fp32"
QUANTISED_EXPERTS = "moe t50 e6 k2 d96 f64 bf16 w:mxfp4"
INT4_EXPERTS = "moe t50 e6 k2 d96 f64 bf16 w:int4_g32_zero"
EXPERT_GRADIENTS = "moebwd t50 e6 k2 d32 f24 fp32"
MERGE = "attnmerge p3 t50 h2 d24 fp32"
ON_GPU = "attn b1 h2 q100 d64 fp16"
ONE_HEAD = "attn b1 h1 q100 d64 fp16"


@dataclass(frozen=True)
class Fault:
    """A fault's name and what its refusal must say: every one of ``words``, each of which may be alternatives."""

    name: str
    stage: str
    words: tuple[str, ...]
    problem: str | None = ATTENTION
    has_a_number: bool = False  # a true one, and not the one that it promised

    @property
    def spec(self) -> str:
        return PLANTED[self.name]


def fault(name: str, stage: str, *words: str, **more: object) -> Fault:
    return Fault(name, stage, words, **more)  # type: ignore[arg-type]


# Faults that are found by calls alone.
WRONG = (
    fault("wrong_in_one_element", "correctness", r"\(at \[0, 1, 7, 3\]\)", "1 of 2240 elements is wrong"),
    fault("tile_of_48", "correctness", r"maximum error [23]\.\d+ is above"),
    fault("ignores_the_mask", "correctness", "maximum error"),
    fault("another_mask", "correctness", "maximum error", problem=UNEQUAL),
    fault("ignores_the_scale", "correctness", "softmax scale"),
    fault("no_maximum", "correctness", "on inputs that are large", "NaN or infinite"),
    fault("constant_output", "correctness", "its output is constant"),
    fault("maximum_from_zero", "correctness", "every score far below zero"),
    fault("mask_of_minus_100", "correctness", "every score far below zero"),
    fault("right_on_zeros_only", "correctness", "maximum error", "all zero it is right"),
    fault("right_on_one_seed", "correctness", "right for one seed, wrong for another"),
    fault("bf16_inside", "correctness", "lower precision inside"),
    fault("fp8_inside", "correctness", "lower precision inside"),
    fault("row_sum_in_halves", "correctness", "lower precision inside", problem=None),
    fault("output_not_written", "correctness", "unwritten"),
    fault("writes_past_the_end", "correctness", r"wrote past the end of an input \(v\)"),
    fault("writes_past_its_output", "correctness", "wrote past the end of a tensor that it allocated"),
    fault("reads_beyond_its_tensors", "correctness", "reads beyond its tensors", "NaN"),
    fault("changes_its_input", "correctness", r"changed its inputs \(v\)"),
    fault("returns_its_input", "correctness", "memory of an input"),
    fault("cached_by_pointer", "correctness", "output of an earlier call", "the same memory, new values"),
    fault("cached_by_shape", "correctness", "output of an earlier call", "other memory"),
    fault("reuses_its_output", "correctness", "memory of its earlier output"),
    fault("rings_of_outputs", "correctness", "memory of its earlier output"),
    fault("changes_earlier_answers", "correctness", "still holds is changed by a later call"),
    fault("wrong_now_and_then", "correctness", "wrong now and then", "index 69 of dimension 2|maximum error"),
    fault("fails_now_and_then", "correctness", "it failed in one call|does not run", "no buffer is free"),
    fault("returns_nothing_at_times", "correctness", "left to its default", "NoneType, not a plain tensor"),
    fault("works_on_a_thread", "correctness", "another stream or thread|changed by a later call"),
    fault("burns_the_other_cores", "correctness", "threads of its own go on", "_burn"),
    fault(
        "changes_the_settings", "correctness", "settings changed", "num_threads", "float32_matmul_precision", "autocast.s dtype"
    ),
    fault("lazy_output", "correctness", "_Lazy, not a plain tensor"),
    fault("not_the_same_twice", "correctness", "promised the same bits"),
    fault("wrong_shape", "correctness", r"shape \[1, 70, 2, 16\]"),
    fault("wrong_dtype", "correctness", "float64; it must be float32"),
    fault("crashes", "correctness", "crashed: SIGSEGV", "illegal memory access"),
    fault("exits", "correctness", "ended the process with code 0"),
    fault("ends_the_interpreter", "correctness", r"sys.exit\(0\)"),
    fault("forges_an_answer", "correctness", "harness's own pipe"),
    fault("moe_drops_tokens", "correctness", "maximum error", problem=EXPERTS),
    fault("moe_swaps_gate_and_up", "correctness", "maximum error", problem=EXPERTS),
    fault("moe_room_for_few", "correctness", "all tokens for the same experts", problem=EXPERTS),
    fault("moe_scales_of_the_block_before", "correctness", "right for scales of the block before", problem=QUANTISED_EXPERTS),
    fault("moe_swaps_nibbles", "correctness", "even column is the high four bits", problem=QUANTISED_EXPERTS),
    fault("moe_reads_gptq_s_zero_points", "correctness", "zero points that are one more", problem=INT4_EXPERTS),
    fault("gradient_without_the_last_tile", "correctness", "dq: maximum error", problem=GRADIENTS),
    fault("gradient_of_other_heads", "correctness", "dk: maximum error", problem=GRADIENTS),
    fault("gradient_in_another_order", "correctness", "promised the same bits", problem=GRADIENTS),
    fault("expert_gradient_without_the_router", "correctness", "drouting: maximum error", problem=EXPERT_GRADIENTS),
    fault("expert_gradient_weighted_twice", "correctness", "dx: maximum error", "applied twice", problem=EXPERT_GRADIENTS),
    fault("expert_gradient_in_another_order", "correctness", "promised the same bits", problem=EXPERT_GRADIENTS),
    fault("does_not_import", "preflight", "undefined symbol: _ZN2at4_ops"),
    fault("works_ahead", "sanity", "replaced torch._foreach_mul_"),
    fault("merge_by_the_largest", "correctness", "out: maximum error", problem=MERGE),
    fault("merge_keeps_the_largest", "correctness", "lse: maximum error", "right for the largest", problem=MERGE),
    fault("merge_reads_what_has_no_key", "correctness", "NaN or infinite", problem=MERGE),
    fault("merge_nothing_is_nan", "correctness", "out is NaN or infinite", problem=MERGE),
    fault("merge_in_16_bits", "correctness", "out: RMS error", problem=MERGE),
    fault("replaces_an_operator", "sanity", "replaced the operator aten::clone"),
    fault("leaves_a_mode", "correctness", "settings changed", "torch function modes"),
    fault("patches_the_timer", "sanity", "replaced time.perf_counter", "clocks"),
    fault("heads_interleaved", "correctness", r"reads key/value head h % heads_kv", problem=GROUPED),
    fault("requires_grad", "correctness", "its output requires gradients"),
    fault("sums_its_input", "correctness", "output of an earlier call", "one element of an input changed"),
    fault("sets_backend_flags", "correctness", "settings changed", "cudnn.benchmark True", "denormal", "garbage collection"),
    fault("drifts", "correctness", "wrong now and then", "error grows from call to call"),
)
# Faults that only a clock meets.
TIMED = (
    fault("skips_after_many_calls", "correctness", "skips work when it is timed"),
    fault("skips_when_timed", "correctness", "skips work when it is timed"),
    fault(
        "works_on_more_threads",
        "timing",
        "on other threads than the one that is timed",
        problem="attn b1 h8 q512 d64 fp32",
    ),
    fault("starts_a_burner", "timing", "processes that it started work while it is timed|rival was slowed"),
    fault("knows_a_cut_sample", "correctness", "skips work when it is timed"),
    fault("puts_work_off", "timing", "defers work until its results are read"),
    fault("slows_its_rival", "timing", "rival was slowed"),
    fault(
        "claims_more_than_it_gives",
        "promise",
        r"promised 1\.7 times",
        r"measured against sdpa: 0\.\d+ times",
        has_a_number=True,
    ),
)
FORGED = fault("forges_samples", "timing", "clock disagrees with the harness's")
SLOW = (fault("hangs", "correctness", r"hung: no answer within [\d.]+ s"),)
GPU = (
    # One head: what is past its rows is past the tensor.
    fault("gpu/writes_past_the_end", "correctness", "wrote past the end of a tensor that it allocated", problem=ONE_HEAD),
    fault("gpu/reads_beyond_its_tensors", "correctness", "reads beyond its tensors", problem=ONE_HEAD),
    fault("gpu/wrong_kernel", "callpath", "threads a block 384, saw 128", problem=ON_GPU),
    fault("gpu/another_kernel", "callpath", "promised a kernel named 'warp_specialised_attention'; saw", problem=ON_GPU),
    fault("gpu/tile_too_large", "correctness", "shared memory", problem=ON_GPU),
    fault("gpu/side_stream", "callpath|correctness", "stream", problem=ON_GPU),
    fault("gpu/skips_when_captured", "timing|correctness", "skips work when it is timed", problem=ON_GPU),
    fault("gpu/patches_the_events", "sanity", "replaced", "elapsed_time|synchronize", problem=ON_GPU),
    fault("gpu/keeps_the_l2", "correctness|sanity", "L2", problem=ON_GPU),
    # In 16 bits, most of what the order of a sum changes is rounded off.
    fault("gpu/races", "correctness", "promised the same bits", problem="attn b1 h2 q100 d64 fp32"),
)

# Faults that only the sweep of ``flashmoe check`` and ``flashmoe prove`` meets: the problem of the sweep, None for its first.
ONE_QUERY = "attn b2 h2 q1 k200 d64"
LONG = "attn b2 h8 hk1 q1 k1100 d256 bf16"
TILES = "attn b1 h2 q150 d64 fp16"
PAIR = "attn b2 h8 hk2 q40 k200 d64 bf16 causal"
SWEPT = (
    fault("gradient_without_the_log_sum_exp", "", "wrong with a gradient into the log-sum-exp too", problem=None),
    fault("wrong_in_inference_mode", "", r"wrong under torch.inference_mode\(\)", problem=None),
    fault("wrong_without_gradients", "", r"wrong under torch.no_grad\(\)", problem=None),
    fault("wrong_in_training", "", "wrong on inputs that require gradients", problem=None),
    fault("wrong_on_another_thread", "", "wrong on another thread", problem=None),
    fault("reads_v_as_k", "", "wrong with K and V in two memory orders", problem=None),
    fault(
        "reads_k_as_q", "", "wrong with K and V in two memory orders|wrong with strides of 0", problem="attn b2 h3 q70 d64 bshd"
    ),
    fault("rows_without_gaps", "", "wrong with views of one projection", problem=None),
    fault("one_memory_is_one_tensor", "", "wrong with views of one projection", problem=None),
    fault("copies_by_address", "", "wrong with tensors that begin at odd addresses", problem=None),
    fault("ignores_a_stride_of_zero", "", "wrong with strides of 0", problem=None),
    fault("at_most_8_heads_a_key_head", "", "maximum error", problem="attn b1 h16 hk1 q20 d64"),
    fault("at_most_64_heads_a_key_head", "", "maximum error", problem="attn b1 h128 hk1 q1 k40 d64"),
    fault("at_most_65535_programs", "", "maximum error", problem="attn b64 h1025 q1 k2 d8"),
    fault("at_most_8_batches", "", "maximum error", problem="attn b9 h2 q33 d32 causal"),
    fault("at_most_1024_keys", "", "maximum error", problem="attn b1 h2 q3 k1100 d64"),
    fault("values_no_wider_than_keys", "", "maximum error", problem="attn b1 h2 q70 d64 dv128"),
    fault("one_key_gives_its_value", "", "memory of an input", problem="attn b1 h2 q70 k1 d64"),
    fault("one_key_more", "", "maximum error", problem="attn b1 h2 q64 k65 d64 causal"),
    fault("one_key_fewer", "", "maximum error", problem="attn b1 h2 q65 k64 d64 causal"),
    fault("no_maximum_under_a_mask", "", "wrong on inputs that are large", problem="attn b1 h2 q24 k40 d64 causal"),
    fault("no_maximum_of_one_query", "", "wrong on inputs that are large", problem=ONE_QUERY),
    fault("scores_in_halves", "", "wrong with one key that is an outlier", problem=None),
    fault("sums_in_bf16", "", "wrong on inputs that are all the same", problem="attn b1 h2 q1 k8300 d64"),
    fault("sums_in_fp16", "", "wrong on inputs that are all the same", problem="attn b1 h2 q1 k8300 d64 fp16"),
    fault("one_address_is_one_tensor", "", "wrong with V as the first columns of K", problem=None),
    fault("whole_tiles_end_early", "", "maximum error", problem="attn b1 h4 hk2 q16 k512"),
    fault("old_answer_of_one_query", "", "the output of an earlier call", problem=ONE_QUERY),
    fault("one_buffer_of_one_query", "", "memory of its earlier output", problem=ONE_QUERY),
    fault("keeps_every_address", "", "its memory grows with each call", problem=None),
    fault("offsets_of_32_bits", "", r"wrong with K and V that reach over 2\^31", problem=None),
    fault("batches_come_first", "", "wrong with rows before batches in memory", problem=None),
    fault("positions_in_fp16", "", "maximum error", problem="attn b1 h2 q33 k4200"),
    fault("keeps_every_answer", "", "its memory grows with each call", problem=None),
    fault("keeps_every_input", "", "its memory grows with each call", problem=None),
    fault("wrong_soft_cap", "", "it is right for no soft cap", problem="attn b2 h2 q40 k60 d64 bf16 causal softcap2"),
    fault("nan_where_a_mask_hides_all", "", "see no key", problem="attn b2 h2 q40 k33 d64 bf16 causal boolmask"),
    fault("shared_heads_in_fp32", "", "h % heads_kv", problem="attn b2 h8 hk2 q33 k70 d40 dv24 causal fp32"),
    fault("at_most_1024_queries", "", "maximum error", problem="attn b1 h1 q1030 k33 d16"),
    fault("no_window_of_one_query", "", "it is right for no window", problem="attn b2 h4 hk2 q1 k200 d128 bf16 causal left16"),
    fault("a_window_of_0_is_none", "", "it is right for no window", problem="attn b1 h2 q40 d64 bf16 causal left0"),
    fault(
        "no_sinks_in_a_window", "", "it is right for no sinks", problem="attn b2 h8 hk2 q40 k200 d64 bf16 causal left16 sinks"
    ),
    fault("sinks_of_the_first_call", "", "right for one seed", problem="attn b1 h2 q60 k40 d128 fp32 causal sinks"),
    fault("slopes_of_key_heads", "", "maximum error", problem="attn b1 h4 hk2 q60 k40 d64 bf16 alibi"),
    fault("mask_without_gaps", "", "wrong with slices of larger", problem="attn b2 h4 hk2 q1 k150 d128 fp32 boolmask"),
    fault(
        "nan_where_a_tile_is_hidden", "", "wrong with a mask that hides the first", problem="attn b2 h4 hk2 q1 k150 d128 fp32 b"
    ),
    fault(
        "no_gradient_of_sinks_in_a_window",
        "",
        "output 3: maximum error",
        problem="attnbwd b2 h8 hk2 q40 k200 d64 bf16 causal left16 sinks",
    ),
    fault("moe_without_the_down_bias", "", "maximum error", problem="moe t9 e4 k2 d32 f24 bf16 bias"),
    fault("moe_at_most_1024_columns", "", "maximum error", problem="moe t20 e4 k2 d1040 f24"),
    fault("moe_no_bias_in_a_format", "", "it is right for no biases", problem="moe t9 e4 k2 d96 f64 bf16 w:mxfp4 bias"),
    fault("expert_gradient_without_the_down_bias", "", "output 5: maximum error", problem="moebwd t9 e4 k2 d32 f24 bf16 bias"),
    fault("moe_at_most_64_experts", "", "maximum error", problem="moe t20 e128 k8 d32 f24"),
    fault("merge_of_eight_parts", "", "lse: maximum error", problem="attnmerge p9 t20 h4 d80 fp32"),
    fault("merge_with_a_maximum_of_0", "", "wrong with log-sum-exps near -3000", problem=None),
    fault("merge_of_64_heads", "", "out: maximum error", problem="attnmerge p2 t3 h128 d512 bf16"),
    fault("merge_of_256_columns", "", "out: maximum error", problem="attnmerge p2 t3 h128 d512 bf16"),
    fault("merge_at_most_65535_tokens", "", "out: maximum error", problem="attnmerge p2 t66000"),
    fault("merge_reads_parts_in_a_row", "", "wrong with slices of larger tensors", problem="attnmerge p3 t70 h3 d40 fp32"),
    fault("merge_reads_log_sum_exps_in_a_row", "", "in another memory order", problem="attnmerge p3 t70 h3 d40 fp32"),
    fault("merge_without_a_maximum", "", "wrong with log-sum-exps near 3000", problem=None),
    fault("moe_at_most_8_experts_a_token", "", "maximum error", problem="moe t20 e512 k10"),
    fault("moe_decodes_3_tokens", "", "maximum error", problem="moe t4 e32 k4"),
    fault("moe_at_most_256_experts", "", "maximum error", problem="moe t64 e512 k8 d32 f24"),
    fault("moe_minus_one_is_the_last", "", r"wrong with ids of -1", problem=None),
    fault("moe_past_the_last_is_the_last", "", r"wrong with ids of E", problem=None),
    fault("moe_counts_an_expert_once", "", "wrong with an expert named twice", problem=None),
    fault("moe_divides_by_the_sum", "", "wrong with weights that do not sum to one", problem=None),
    fault("moe_at_most_1024_pairs", "", "maximum error", problem="moe t300 e160 k6 d24 f16"),
    fault("moe_reads_weights_as_rows", "", "maximum error", problem="moe t37 e8 k2 d64 f64 transposed"),
    fault("moe_reads_ids_as_int32", "", "wrong with ids of int64", problem=None),
    fault("moe_sums_at_one_level", "", "it is right for sums of 14 bits", problem="moe t5 e2 k1 d2048 f128 bf16 w:fp8_block"),
    fault("moe_flushes_subnormal_codes", "", "subnormal are 0", problem="moe t5 e4 k2 d200 f72 bf16 w:fp8_block"),
    fault("moe_rounds_scales", "", "scales that are rounded to bf16", problem="moe t5 e2 k1 d2048 f128 bf16 w:fp8_block"),
    fault("moe_reads_ids_in_a_row", "", "wrong with slices of larger tensors", problem=None),
    fault("no_maximum_of_the_inputs", "", "on inputs that are huge", problem=None),
    fault("expert_gradient_of_other_ranks", "", r"wrong with ids of -1", problem=None),
    fault("expert_gradient_read_in_a_row", "", "wrong with a gradient whose tokens are columns", problem=None),
    fault("causal_mask_lost_in_splits", "", "it is right for no mask", problem="attn b1 h2 q33 k1100 d16 causal"),
    fault("causal_mask_lost_far_down", "", "maximum error", problem="attn b1 h1 q1030 d8 causal"),
    fault("a_last_split_that_is_full", "", "maximum error", problem="attn b1 h4 hk2 q1 k2048"),
    fault("at_most_128_heads_of_batches", "", "maximum error", problem="attn b33 h8 q17 d16 causal"),
    fault("window_lost_in_splits", "", "it is right for no window", problem=f"{LONG} left16"),
    fault("a_right_window_of_0_is_none", "", "wrong with a causal mask that the window gives", problem=f"{PAIR} left16"),
    fault(
        "a_right_window_alone_is_none",
        "",
        "wrong with a causal mask that the window gives",
        problem="attn b3 h4 hk2 q33 k70 d40 dv24 causal bshd",
    ),
    fault("right_window_of_shared_heads", "", "maximum error", problem="attn b2 h4 hk2 q70 d64 fp16 left9 right3"),
    fault("window_lost_in_batches", "", "it is right for no window", problem="attn b2 h4 hk2 q300 d32 fp16 causal left20"),
    fault("no_causal_mask_in_an_open_window", "", "maximum error", problem=f"{PAIR} left16"),
    fault("wide_values_in_a_window", "", "maximum error", problem="attn b1 h4 hk2 q33 k70 d40 dv24 fp32 causal left16"),
    fault("sinks_of_each_split", "", "each sink counts twice", problem=f"{LONG} sinks"),
    fault("sinks_of_the_first_tile", "", "maximum error", problem=f"{TILES} sinks"),
    fault("slopes_lost_in_splits", "", "maximum error", problem=f"{LONG} alibi"),
    fault("slopes_lost_in_a_window", "", "maximum error", problem=f"{PAIR} left16 alibi"),
    fault("sinks_under_the_soft_cap", "", "maximum error", problem=f"{PAIR} softcap2 sinks"),
    fault("soft_cap_lost_beside_a_mask", "", "it is right for no soft cap", problem=f"{PAIR} softcap2 bias"),
    fault("mask_lost_beside_sinks", "", "maximum error", problem=f"{PAIR} sinks boolmask"),
    fault("mask_of_the_first_tile", "", "maximum error", problem=f"{TILES} boolmask"),
    fault("moe_a_token_of_no_expert", "", "wrong with a token of no expert", problem=None),
    fault("moe_no_weight_of_one_expert", "", "maximum error", problem="moe t2 e8 k1 d64 f48"),
    fault("moe_at_most_65535_tokens", "", "maximum error", problem="moe t66000"),
    fault("moe_no_bias_in_prefill", "", "maximum error", problem="moe t140 e40 k4 d64 f96 bf16 bias"),
    fault("moe_other_activation_in_prefill", "", "it is right for silu", problem="moe t140 e40 k4 d64 f96 bf16 clamped"),
    fault("moe_scales_of_16_experts", "", "maximum error", problem="moe t140 e40 k4 d64 f96 bf16 w:fp8_channel"),
    fault("gradients_summed_in_16_bits", "", "inputs that are all the same: dv", problem="attnbwd b1 h1 q1030 k33 d16"),
    fault("no_gradient_where_q_is_frozen", "", "wrong with one gradient at a time, by a second", problem=None),
    fault("gradient_of_the_first_backward", "", "wrong with one gradient at a time, by a second", problem=None),
    fault("gradient_of_k_where_v_has_none", "", "wrong with one gradient at a time, by a second", problem=None),
    fault("expert_gradient_of_the_first_backward", "", "wrong with one gradient at a time, by a second", problem=None),
    fault("no_gradient_of_sinks", "", "output 3: maximum error", problem="attnbwd b1 h2 q150 d64 fp16 sinks"),
    fault("expert_gradient_not_written", "", "dw1 is NaN|dw1: maximum error", problem="moebwd t1 e8 k2 d64 f48"),
    fault("wrong_under_autocast", "", "wrong under torch.autocast", problem=None),
    fault("one_query_of_fp32_in_bf16", "", "maximum error", problem="attn b2 h5 hk1 q1 k300 d256 causal fp32"),
    fault("wide_heads_of_fp32_in_bf16", "", "maximum error", problem="attn b1 h4 hk2 q33 k22 d256 bshd fp32"),
    fault("narrow_values_of_one_query", "", "maximum error", problem="attn b1 h14 hk2 q1 k1100 d65 dv32 causal fp16"),
    fault("groups_of_12", "", "maximum error", problem="attn b1 h12 hk1 q70 d24 causal"),
    fault("odd_columns", "", "maximum error", problem="attn b3 h32 hk1 q1 k257 d33 bf16"),
    fault("rows_without_keys_of_shared_heads", "", "see no key|NaN", problem="attn b1 h6 hk1 q65 k43 d128 causal"),
    fault("expanded_queries", "", r"wrong with strides of 0 \(expanded Q", problem=None),
    fault("negative_scale_of_one_query", "", "wrong with a negative softmax scale", problem="attn b1 h6 hk2 q1 k70 d64"),
    fault("gradient_of_the_last_forward", "", "wrong with another forward before the backward", problem=None),
    fault("gradient_as_the_output_lies", "", "wrong with a gradient in another memory order", problem=None),
    fault("half_a_gradient_under_autocast", "", "wrong under torch.autocast", problem=None),
    fault("expert_gradient_of_the_last_forward", "", "wrong with another forward before the backward", problem=None),
    fault("moe_experts_without_gaps", "", "wrong with experts that are slices of larger ones", problem=None),
    fault("moe_takes_a_weight_of_zero_for_none", "", "wrong with weights of zero and below", problem=None),
    fault("moe_copies_by_address", "", "wrong with views of one flat tensor", problem=None),
    fault("moe_one_order_of_both", "", "wrong with w1 and w2 in two memory orders", problem=None),
    fault("moe_few_experts_of_fp16", "", "maximum error", problem="moe t128 e256 k5 d72 f20 fp16 transposed"),
    fault("moe_wrong_under_autocast", "", "wrong under torch.autocast", problem=None),
    fault("moe_softmax_over_all", "", "it is right for a softmax over all experts", problem=None),
    fault("moe_router_of_256_experts", "", "maximum error", problem="moe t64 e512 k8 d32 f24"),
    fault("moe_router_masks_by_value", "", "wrong with two experts that are equal, as are their logits", problem=None),
    fault("moe_exponential_of_the_gate", "", "wrong on inputs that are large", problem=None),
    fault("moe_router_without_the_maximum", "", "wrong with router logits far from zero", problem=None),
    fault("moe_reads_logits_in_a_row", "", "wrong with slices of larger tensors", problem=None),
    fault("moe_reads_choices_in_a_row", "", "wrong with tokens that are columns", problem=None),
    fault("moe_at_most_65535_pairs", "", "maximum error", problem="moe t33000 e4 k2"),
    fault("moe_experts_of_a_power_of_two", "", "maximum error", problem="moe t1 e60 k4 d40 f24"),
    fault("moe_reads_square_weights_as_rows", "", "maximum error", problem="moe t37 e8 k2 d64 f64 transposed"),
    fault("moe_sums_in_16_bits", "", "inputs that are all the same", problem="moe t9 e64 k64 d32 f24"),
    fault("scale_of_wide_heads", "", "wrong with another softmax scale", problem="attn b1 h2 q70 d160"),
    fault("rows_of_fp32_without_gaps", "", "wrong with slices of larger", problem="attn b2 h2 q33 k300 d32 dv8 causal fp32"),
    fault("heads_of_whole_caches", "", "wrong with slices of larger tensors", problem=None),
    fault("wrong_under_a_default_dtype", "", "wrong under torch.set_default_dtype", problem=None),
    fault("whole_tiles_after_others", "", "maximum error", problem="attn b1 h2 q128 k384 d32 causal"),
    fault("bf16_in_fp16", "", "wrong on inputs that are tiny", problem="attn b2 h2 q65 d64 bf16"),
    fault("parts_beyond_fp16", "", "inputs that are all the same", problem="attn b1 h2 q1 k8300 d64 fp16"),
    fault("no_window_of_all_keys", "", "maximum error", problem=f"{PAIR} left999"),
    fault("output_of_another_softmax", "", "wrong with its output, of inputs that require", problem=None),
    fault("output_kept_as_an_attribute", "", "wrong with its output changed in place", problem=None),
    fault("gradient_without_gaps", "", "wrong with slices of larger tensors", problem=None),
    fault("output_of_other_experts", "", "wrong with its output, of inputs that require", problem=None),
    fault("expert_gradient_without_gaps", "", "wrong with a gradient that is a slice", problem=None),
    fault("moe_reads_biases_in_a_row", "", "wrong with slices of larger tensors", problem="moe t9 e4 k2 d32 f24 bf16 bias"),
    fault("moe_reads_scales_in_a_row", "", "wrong with slices of larger", problem="moe t9 e4 k2 d96 f64 bf16 w:mxfp4"),
    fault("moe_minus_one_is_the_last_in_prefill", "", "wrong with ids of -1", problem="moe t129 e4 k2 d100 f36"),
    fault("moe_bf16_in_fp16", "", "wrong on inputs that are tiny", problem=None),
    fault("moe_wrong_under_a_default_dtype", "", "wrong under torch.set_default_dtype", problem=None),
    fault("expert_gradients_summed_in_16_bits", "", "dw1: maximum error", problem="moebwd t66000"),
)
SWEPT_ON_GPU = (fault("gpu/works_on_the_default_stream", "", "wrong on another stream", problem="attn b1 h2 q128 d64"),)


HARMLESS = {"floods_its_output", "leaves_an_idle_thread", "moves_the_random_state"}

# What a function in a child is refused for, and a kernel of the package in this process cannot be.
NOT_IN_OURS = {
    "row_sum_in_halves": "its contract is no operation of the package",
    "does_not_import": "nothing of the package is there where a module of it does not import",
    "crashes": "it takes its process with it",
    "exits": "it takes its process with it",
    "ends_the_interpreter": "it takes its process with it",
    "hangs": "nobody watches over this process",
    "forges_an_answer": "there is no pipe to write into",
    "floods_its_output": "no fault",
    "leaves_an_idle_thread": "no fault",
    "moves_the_random_state": "no fault",
    "returns_nothing_at_times": "kernels are always given a scale",
    "knows_a_cut_sample": "a sample of ours has no tap that it could look for: it computes",
}
# Words of a kernel of ours, whose first call alone decides before the rest of the exam, where those above do not come up.
WORDS_IN_OURS: dict[str, tuple[str, ...]] = {
    "right_on_zeros_only": ("maximum error",),
    "output_not_written": ("maximum error|NaN or infinite",),
    "works_on_a_thread": ("maximum error",),
    "burns_the_other_cores": ("threads of its own go on",),
    # which call is the thousandth rests on how many the exam makes: one of its own, or of a sample
    "skips_after_many_calls": ("skips work when it is timed|in the memory of its earlier output|output of an earlier call",),
}
