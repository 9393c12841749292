"""One rank of several: the cases of experts that are spread over ranks, held to one process's ``fused_moe`` of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from tests.unit.parallel.context_ranks import refused
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from flashmoe_science import explain, fused_moe
from flashmoe_science.measure.tolerance import check_output, expected, general_cap
from flashmoe_science.moe import quantize_experts
from flashmoe_science.parallel import ExpertWorkspace, expert_parallel_moe
from flashmoe_science.parallel.workspace import Combine

Tensors = tuple[torch.Tensor, ...]
DIM, HIDDEN = 32, 16
EXACT_DTYPES = (torch.float32, torch.bfloat16)  # in which PyTorch's sums on the CPU depend on an expert's rows alone


class Case(NamedTuple):
    """tokens: of each rank in turn. routing: random; "one": all to the first expert; "foreign": of which some are no expert's;
    "twice": an expert given twice."""

    tokens: tuple[int, ...] = (7, 5, 0, 6)
    routing: str = "random"
    dtype: torch.dtype = torch.float64
    top_k: int = 3
    per_rank: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    biases: bool = False
    ungated: bool = False
    max_tokens: int = 8

    def own(self, group: dist.ProcessGroup) -> range:
        """This rank's tokens of all."""
        first = sum(self.tokens[rank % len(self.tokens)] for rank in range(group.rank()))
        return range(first, first + self.tokens[group.rank() % len(self.tokens)])

    def workspace(self, group: object, ranks: int) -> ExpertWorkspace:
        return ExpertWorkspace(group, self.max_tokens, DIM, self.top_k, self.per_rank * ranks, self.dtype, "collectives")


GPT_OSS = (("activation", "clamped_silu"), ("interleaved", True), ("transposed", True))
CASES = {
    "unequal": Case(),
    "full": Case((8,)),
    "one token": Case((1, 0), max_tokens=1),
    "no tokens on the first rank": Case((0, 8)),
    "no tokens": Case((0,)),
    "all to one expert": Case(routing="one"),
    "ids of no expert": Case(routing="foreign"),
    "an expert twice": Case(routing="twice"),
    "one expert a rank": Case(per_rank=1, top_k=1),
    "biases": Case(biases=True),
    "gpt-oss": Case(options=(*GPT_OSS, ("limit", 0.5)), biases=True),
    "no gate": Case(ungated=True, options=(("activation", "relu2"),)),
    "recomputed": Case(options=(("recompute", True),)),
    "bf16": Case((61, 40, 0, 13), dtype=torch.bfloat16, max_tokens=64, per_rank=4),
    "fp32": Case((61, 40, 0, 13), dtype=torch.float32, max_tokens=64, per_rank=4),
    "fp32, foreign": Case((9, 0), "foreign", torch.float32, max_tokens=16, per_rank=4),
    "fp32, clamped": Case((3, 0), dtype=torch.float32, options=GPT_OSS, per_rank=3),  # no whole number of 32 elements
    "bf16, gpt-oss": Case(dtype=torch.bfloat16, options=GPT_OSS, biases=True, per_rank=3),
}


class Inputs(NamedTuple):
    """Of all ranks; ``leaves``: hidden, gate_up, down, weights, and biases."""

    leaves: Tensors
    ids: torch.Tensor
    gradient: torch.Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(tuple(one.to(dtype) for one in self.leaves), self.ids, self.gradient.to(dtype))


def inputs_of(case: Case, ranks: int) -> Inputs:
    """The same on every rank."""
    draw = torch.Generator().manual_seed(1)
    tokens, experts = sum(case.tokens[rank % len(case.tokens)] for rank in range(ranks)), case.per_rank * ranks
    rows = HIDDEN if case.ungated else 2 * HIDDEN
    shapes = [(tokens, DIM), (experts, rows, DIM), (experts, DIM, HIDDEN), (tokens, case.top_k)]
    shapes += [(experts, rows), (experts, DIM)] * case.biases
    leaves = [torch.randn(shape, generator=draw, dtype=torch.float64) * 0.5 for shape in shapes]
    leaves[3] = leaves[3].abs().float().double()  # routing weights travel in fp32 at least
    if dict(case.options).get("transposed"):
        leaves[1:3] = [one.mT.contiguous() for one in leaves[1:3]]
    ids = torch.randint(experts, (tokens, case.top_k), generator=draw)
    if case.routing == "one":
        ids.zero_()
    elif case.routing == "foreign":
        ids = torch.where(torch.rand(ids.shape, generator=draw) < 0.5, torch.tensor([-1, experts, 2**32])[ids % 3], ids)
    elif case.routing == "twice":
        ids[:, 1] = ids[:, 0]
    dtypes = [case.dtype] * 3 + [torch.promote_types(case.dtype, torch.float32)] + [case.dtype] * 2
    leaves = [one.to(dtype) for one, dtype in zip(leaves, dtypes, strict=False)]
    return Inputs(tuple(leaves), ids, torch.randn(tokens, DIM, generator=draw).to(case.dtype))


def own_of(inputs: Inputs, case: Case, group: dist.ProcessGroup) -> Inputs:
    """This rank's tokens and experts."""
    tokens, experts = case.own(group), case.per_rank * group.rank()
    of_tokens, of_experts = slice(tokens.start, tokens.stop), slice(experts, experts + case.per_rank)
    parts = [of_tokens, of_experts, of_experts, of_tokens, of_experts, of_experts]
    leaves = tuple(one[part].clone() for one, part in zip(inputs.leaves, parts, strict=False))
    return Inputs(leaves, inputs.ids[of_tokens], inputs.gradient[of_tokens])


def with_gradients(call: Callable[..., torch.Tensor], inputs: Inputs, case: Case) -> Tensors:
    """The output, and the gradients of the leaves."""
    leaves = [one.detach().requires_grad_() for one in inputs.leaves]
    biases = dict(zip(("gate_up_bias", "down_bias"), leaves[4:], strict=False))
    with torch.autograd.set_detect_anomaly(True):  # which reports a NaN that is never used too, as of an empty place
        out = call(*leaves[:4], inputs.ids, **biases, **dict(case.options))
        return out, *torch.autograd.grad(out, leaves, inputs.gradient)


def faults(case: Case, group: dist.ProcessGroup, combine: str, experts: Callable[..., torch.Tensor] | None = None) -> list[str]:
    """What is wrong with this rank's results.

    Args:
        experts: in place of ours, of this rank's tensors.
    """
    everyones = inputs_of(case, group.size())
    own, workspace = own_of(everyones, case, group), case.workspace(group, group.size())
    ours = experts or partial(expert_parallel_moe, workspace=workspace, combine=combine)
    got, again = (with_gradients(ours, own, case) for _ in range(2))
    names = ("out", "dhidden", "dgate_up", "ddown", "dweights", "dgate_up_bias", "ddown_bias")
    wrong = [
        f"{name} has other bits in a second call"
        for name, *two in zip(names, got, again, strict=False)
        if not torch.equal(*two)
    ]
    exact = list(with_gradients(fused_moe, everyones.to(torch.float64), case))
    plain = list(with_gradients(fused_moe, everyones, case))
    tokens, first = case.own(group), case.per_rank * group.rank()
    for n, name in enumerate(names[: len(got)]):
        part = (
            slice(tokens.start, tokens.stop) if name in ("out", "dhidden", "dweights") else slice(first, first + case.per_rank)
        )
        one, reference, usual = got[n].detach(), exact[n].detach()[part], plain[n].detach()[part]
        if not one.numel():
            continue
        if name == "out" and combine == "exact" and case.dtype in EXACT_DTYPES and not torch.equal(one, usual):
            wrong.append(f"out is not one process's: off by {(one - usual).abs().max()}")
        if case.dtype != torch.float64:
            # Of the gradient of fp32 weights too, which comes of products in the case's dtype.
            wrong += check_output(name, one, expected([reference], [usual], [general_cap(reference, case.dtype)])[0])[1]
        elif not (error := (one - reference).abs().max().item()) < 1e-13:
            wrong.append(f"{name} is off by {error}")
    return wrong


def check_faults(group: dist.ProcessGroup) -> list[str]:
    """Mistakes are noticed by these very tests."""
    case = CASES["full"]
    workspace = case.workspace(group, group.size())

    def changed(
        change: Callable[[list[Any]], None], x: Any, w1: Any, w2: Any, weights: Any, ids: Any, **more: Any
    ) -> torch.Tensor:
        given = [x, w1, w2, weights, ids]
        change(given)
        return expert_parallel_moe(*given, workspace=workspace, **more)

    def local_ids(given: list[Any]) -> None:
        given[4] = given[4] % case.per_rank

    def weights_twice(given: list[Any]) -> None:
        given[3] = given[3] * given[3]

    def rows_in_another_order(given: list[Any]) -> None:
        given[0] = given[0].flip(0)

    def other_experts(given: list[Any]) -> None:
        given[1:3] = [one.flip(0) for one in given[1:3]]

    def shard_alone(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, **more: Any) -> torch.Tensor:
        return fused_moe(x, w1, w2, weights, ids - workspace.first_expert, **more)

    mistakes = [partial(changed, one) for one in (local_ids, weights_twice, rows_in_another_order, other_experts)]
    missed = []
    for mistake in (*mistakes, shard_alone):
        name = (mistake.args[0] if isinstance(mistake, partial) else mistake).__name__
        if not any("out is off" in one for one in faults(case, group, "exact", mistake)):
            missed.append(f"{name} is not noticed")
    return missed


def check_dtensors(group: dist.ProcessGroup) -> list[str]:
    """Experts that are DTensors give what their local tensors give; their gradients are DTensors."""
    case = CASES["unequal"]
    own, mesh = own_of(inputs_of(case, group.size()), case, group), init_device_mesh("cpu", (group.size(),))
    workspace = case.workspace(mesh, group.size())
    x, gate_up, down, weights = own.leaves
    sharded = [DTensor.from_local(one, mesh, (Shard(0),)).requires_grad_() for one in (gate_up, down)]
    call = partial(expert_parallel_moe, workspace=workspace)
    out = call(x, *sharded, weights, own.ids)
    right = with_gradients(call, own, case)
    gradients = torch.autograd.grad(out, sharded, own.gradient)
    same = [
        torch.equal(out, right[0]),
        *(torch.equal(one.to_local(), other) for one, other in zip(gradients, right[2:4], strict=True)),
    ]
    wrong = [] if all(same) else [f"DTensors give other results: {same}"]
    replicated = DTensor.from_local(gate_up, mesh)
    return wrong + refused(lambda: call(x, replicated, down, weights, own.ids), "it must be Shard(0) over ranks")


def check_pairs(group: dist.ProcessGroup) -> list[str]:
    """Gates and ups as two tensors give what one tensor of both gives, whether a copy joins them or a view."""
    case = CASES["fp32"]
    own, workspace = own_of(inputs_of(case, group.size()), case, group), case.workspace(group, group.size())
    wrong = []
    for combine in get_args(Combine):
        call = partial(expert_parallel_moe, workspace=workspace, combine=combine)

        def of_pair(x: torch.Tensor, gate_up: torch.Tensor, *rest: Any, call: Any = call) -> torch.Tensor:
            return call(x, gate_up.chunk(2, 1), *rest)

        whole, pair = (with_gradients(one, own, case) for one in (call, of_pair))
        wrong += [] if all(map(torch.equal, whole, pair)) else [f"a pair has other bits, {combine}"]
        with torch.no_grad():
            copied = call(own.leaves[0], [one.clone() for one in own.leaves[1].chunk(2, 1)], *own.leaves[2:], own.ids)
        wrong += [] if torch.equal(copied, whole[0]) else [f"a pair without gradients has other bits, {combine}"]
    return wrong


def check_formats(group: dist.ProcessGroup) -> list[str]:
    """Experts in the formats of checkpoints give what they give in one process, those of one row too."""
    wrong, experts, draw = [], 2 * group.size(), torch.Generator().manual_seed(5)
    mine = slice(2 * group.rank(), 2 * group.rank() + 2)
    everyones = torch.randn(group.size(), DIM, generator=draw)
    weights, ids = torch.rand(len(everyones), 3, generator=draw), torch.randint(experts, (len(everyones), 3), generator=draw)
    dense = torch.randn(experts, 2 * 32, DIM, generator=draw), torch.randn(experts, DIM, 32, generator=draw)
    own = slice(group.rank(), group.rank() + 1)
    forms = ("mxfp4", "fp8_block", "fp8_channel", "fp8_channel_static", "int4_g32", "int4_g32_zero")
    static = {name: torch.rand(experts, generator=draw) / 64 for name in ("gate_up_input_scale", "down_input_scale")}
    for form, dtype in product(forms, (torch.bfloat16, torch.float32)):
        x, workspace = everyones.to(dtype), ExpertWorkspace(group, 8, DIM, 3, experts, dtype)
        given = quantize_experts(*dense, form.removesuffix("_static"))
        given |= static | {"weight_format": form} if form.endswith("_static") else {}
        options = {name: one[mine] for name, one in given.items() if name != "weight_format"} | {"weight_format": form}
        gate_up, down = options.pop("gate_up_proj"), options.pop("down_proj")
        out = expert_parallel_moe(x[own], gate_up, down, weights[own], ids[own], workspace=workspace, **options)
        whole = fused_moe(x, top_k_weights=weights, top_k_ids=ids, **given)
        wrong += [] if torch.equal(out, whole[own]) else [f"{form} gives another result in {dtype}"]
    return wrong


def check_frozen(group: dist.ProcessGroup) -> list[str]:
    """The gradients that are asked for do not depend on those that are not."""
    case, wrong = CASES["unequal"], []
    own, workspace = own_of(inputs_of(case, group.size()), case, group), case.workspace(group, group.size())
    for combine in get_args(Combine):
        call = partial(expert_parallel_moe, workspace=workspace, combine=combine)
        _, *every = with_gradients(call, own, case)
        for n in range(4):
            leaves = [one.detach().requires_grad_(n == place) for place, one in enumerate(own.leaves)]
            (one,) = torch.autograd.grad(call(*leaves, own.ids), leaves[n : n + 1], own.gradient)
            wrong += [] if torch.equal(one, every[n]) else [f"gradient {n}, {combine}, alone is another"]
    return wrong


def check_checkpoint(group: dist.ProcessGroup) -> list[str]:
    case = CASES["unequal"]
    own, workspace = own_of(inputs_of(case, group.size()), case, group), case.workspace(group, group.size())
    call = partial(expert_parallel_moe, workspace=workspace, combine="reduced")
    kept = with_gradients(call, own, case)
    again = with_gradients(lambda *given: checkpoint(call, *given, use_reentrant=False), own, case)
    return [] if all(map(torch.equal, kept, again)) else ["a checkpoint has other gradients"]


def check_groups(group: dist.ProcessGroup) -> list[str]:
    """A group of some ranks; one expert layer after another in one workspace; shapes of more dimensions; an explanation."""
    world = dist.get_world_size()
    members = [1] if world == 2 else [1, 3]
    some = dist.new_group(members)
    wrong = []
    if dist.get_rank() in members:
        wrong += faults(CASES["unequal"], some, "exact") + faults(CASES["unequal"], some, "reduced")
    case = CASES["full"]
    own, workspace = own_of(inputs_of(case, world), case, group), case.workspace(group, world)
    x, gate_up, down, weights = own.leaves
    flat = expert_parallel_moe(x, gate_up, down, weights, own.ids, workspace=workspace)
    cut = expert_parallel_moe(
        x.view(2, 4, -1), gate_up, down, weights.view(2, 4, -1), own.ids.view(2, 4, -1), workspace=workspace
    )
    wrong += [] if torch.equal(flat, cut.flatten(0, 1)) else ["leading dimensions give another result"]
    if "by collectives of gloo" not in repr(workspace) or f"experts {2 * group.rank()} to" not in repr(workspace):
        wrong.append(f"{workspace!r} does not say what carries tokens, and which experts are here")
    if dist.get_rank() == 0:  # alone: nothing is sent
        decision = explain(expert_parallel_moe, x, gate_up, down, weights, own.ids, workspace=workspace)
        told = decision.kernel == "grouped_mm" and f"gloo: {workspace.cost('exact')}" in decision.reason
        wrong += [] if told else [f"{decision} is no explanation"]
    return wrong


def check_refusals(group: dist.ProcessGroup) -> list[str]:
    """What is refused, by every rank: none waits for another."""
    rank, ranks = group.rank(), group.size()
    other = "it must be the same on every rank"
    sizes: dict[str, Any] = {
        "group": group,
        "max_tokens": 8,
        "hidden": DIM,
        "top_k": 3,
        "experts": 2 * ranks,
        "dtype": torch.float64,
    }
    spaces: list[tuple[str, dict[str, Any]]] = [
        ("group is None; it must be a ProcessGroup", {"group": None}),
        ("max_tokens is 0; it must be at least 1", {"max_tokens": 0}),
        ("hidden is '32'; it must be an integer", {"hidden": "32"}),
        (f"it must be a multiple of the number of ranks, {ranks}", {"experts": 2 * ranks + 1}),
        ("dtype is torch.int8", {"dtype": torch.int8}),
        ("transport is 'ring'; it must be one of collectives, symmetric", {"transport": "ring"}),
        ("the group's backend is gloo, and not nccl; it must be 'collectives'", {"transport": "symmetric"}),
        (f"hidden is {DIM + 1} on rank 1 of the group and {DIM} on rank 0; {other}", {"hidden": DIM + (rank == 1)}),
        (f"top_k is 4 on rank 1 of the group and 3 on rank 0; {other}", {"top_k": 3 + (rank == 1)}),
        (
            f"dtype is torch.float32 on rank 1 of the group and torch.float64 on rank 0; {other}",
            {"dtype": torch.float32 if rank else torch.float64},
        ),
        (
            "max_tokens is 0" if rank == 1 else "rank 1 of the group refuses the call: max_tokens is 0",
            {"max_tokens": 8 * (rank != 1)},
        ),
    ]
    wrong = []
    for words, more in spaces:
        wrong += refused(partial(ExpertWorkspace, **{**sizes, **more}), words)
    case = CASES["full"]
    own, workspace = own_of(inputs_of(case, ranks), case, group), ExpertWorkspace(**sizes)
    x, _, down, _ = own.leaves
    names = ("hidden", "gate_up_local", "down_local", "top_k_weights", "top_k_ids")
    given: dict[str, Any] = {**dict(zip(names, (*own.leaves, own.ids), strict=True)), "workspace": workspace}
    longer = {name: torch.cat((given[name], given[name][:1])) for name in ("hidden", "top_k_weights", "top_k_ids")}
    twice = {name: given[name].repeat(2, 1, 1) for name in ("gate_up_local", "down_local")}
    single = {name: given[name].float() for name in names[:4]}
    narrow = {name: given[name][:, :2] for name in names[3:]}
    theirs, wider = "on rank 1 of the group and", ExpertWorkspace(**{**sizes, "max_tokens": 9})
    calls: list[tuple[str, dict[str, Any]]] = [
        ("workspace is None; it must be an ExpertWorkspace", {"workspace": None}),
        ("combine is 'sum'; it must be one of exact, reduced", {"combine": "sum"}),
        (f"combine is reduced {theirs} exact on rank 0; {other}", {"combine": "reduced" if rank == 1 else "exact"}),
        ("hidden has 9 tokens; the workspace is for at most 8 a rank", longer),
        ("the number of gate_up_local's experts is 4; of the workspace it is 2", twice),
        ("top_k is 2; of the workspace it is 3", narrow),
        ("the dtype of hidden is torch.float32; of the workspace it is torch.float64", single),
        ("hidden_states is a int; it must be a torch.Tensor", {"hidden": 1}),
        ("down_proj has dtype torch.float32", {"down_local": down.float()}),
        ("unexpected keyword argument 'axis'", {"axis": 0}),
        ("activation is 'tanh'", {"activation": "tanh"}),
        ("adapters is given", {"adapters": (None, None)}),
        ("gate_up_proj[0] is a int", {"gate_up_local": (1, 2)}),
        ("gate_up_local is a pair and transposed is True", {"gate_up_local": own.leaves[1].chunk(2, 1), "transposed": True}),
        (f"activation is relu {theirs} silu on rank 0; {other}", {"activation": "relu" if rank == 1 else "silu"}),
        (f"max_tokens of the workspace is 9 {theirs}", {"workspace": wider if rank == 1 else workspace}),
        (f"down_bias.requires_grad is True {theirs}", {"down_bias": down[:, :, 0].detach().requires_grad_(rank == 1)}),
        (f"hidden.requires_grad is True {theirs} False on rank 0; {other}", {"hidden": x.clone().requires_grad_(rank == 1)}),
        (
            "top_k_ids has dtype" if rank == 0 else "rank 0 of the group refuses the call: top_k_ids has dtype",
            {"top_k_ids": own.ids.float() if rank == 0 else own.ids},
        ),
    ]
    for words, more in calls:
        wrong += refused(partial(expert_parallel_moe, **{**given, **more}), words)
    for combine in ("exact", "reduced"):
        out = expert_parallel_moe(**given | {"hidden": x.clone().requires_grad_()}, combine=combine).sum()
        wrong += refused(partial(torch.autograd.backward, out, create_graph=True), "create_graph is True; it must be False")
    return wrong


def check_ended(group: dist.ProcessGroup) -> list[str]:
    """Ranks that wait for one that has ended raise, and say where they were."""
    try:
        CASES["full"].workspace(group, group.size())
    except RuntimeError as error:
        return [] if any("was comparing its arguments" in note for note in error.__notes__) else [f"{error} has no note"]
    return ["it is not noticed"]


def found(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """What is wrong, by case."""
    results = {
        f"{name}, {combine}": faults(case, group, combine) for name, case in CASES.items() for combine in ("exact", "reduced")
    }
    checks = [check_faults, check_dtensors, check_pairs, check_formats, check_frozen, check_groups, check_refusals]
    if group.size() == 2:  # a checkpoint imports PyTorch's compiler
        checks.append(check_checkpoint)
    return results | {f"experts, {check.__name__}": check(group) for check in checks}
