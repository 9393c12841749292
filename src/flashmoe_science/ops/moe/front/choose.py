"""The choice of a kernel and config for the class of a mixture-of-experts call, and the launch bound to its tensors.

A plan is found by all that a kernel is specialised on, and by the class of the number of tokens, which decides the choice. It
keeps no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from operator import is_
from typing import Any, NamedTuple

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.dispatch.tuned import known_table
from flashmoe_science.hardware.probe import gpu_of, place_of
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.cache import MAX_PLANS, Cache
from flashmoe_science.ops.calls import device_guard, is_plain, needs_grad
from flashmoe_science.ops.choose import GRADIENTS, choose, choose_fallback
from flashmoe_science.ops.moe.call import (
    DTYPES,
    Activation,
    Bind,
    MoEInputs,
    MoEKernel,
    MoELaunch,
    Options,
    Rows,
    Shape,
    Tensors,
    check_sums_alone,
    checked,
    dense,
    inputs_of,
    views_of,
)
from flashmoe_science.ops.moe.call.backward import NEW, Sums
from flashmoe_science.ops.moe.call.pair import Pair
from flashmoe_science.ops.moe.front.backward.autograd import Step, unviewed
from flashmoe_science.ops.moe.front.backward.choose import choose_backward, names_of
from flashmoe_science.ops.moe.front.backward.kernels import FALLBACK as FALLBACK_BACKWARD
from flashmoe_science.ops.moe.front.kernels import FALLBACK
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.pytorch import pytorch_moe, saving_moe
from flashmoe_science.problem import rounded_up


class Plan(NamedTuple):
    """The decision for a class of calls; ``bind(inputs, shape)`` makes the launch of one number of tokens, whose result
    has that shape. ``by_address``: the launch depends on pointers only."""

    decision: Decision
    bind: Bind
    by_address: bool


PLANS: Cache[Hashable, Plan] = Cache(MAX_PLANS)
# Takes a call's tensors, what its backward adds to, and the gates and ups if w1 joins them.
TrainingLaunch = Callable[..., torch.Tensor]


def bind_call(tensors: Tensors, options: Options, saves_z: bool = False) -> MoELaunch:
    """The launch for arguments of ``fused_moe`` like these; it takes the tensors as given. Raises as ``fused_moe``.

    ``saves_z``: it also returns the pre-activations, from checked tensors, for the backward that ``options.kernel`` may name.
    """
    (views, activation), shape = checked(tensors, options), tensors.x.shape
    if needs_grad(*tensors) and not saves_z:
        if options.kernel == FALLBACK:
            return lambda *given: unviewed(pytorch_moe(views_of(Tensors(*given), options), activation), shape)
        train = bind_training(tensors, options)
        return lambda *given: train(Tensors(*given))
    if views.x.shape[0] == 0:
        width = views.w1.shape[1]
        return lambda x, *rest: (torch.zeros_like(x), x.new_empty(0, width)) if saves_z else torch.zeros_like(x)
    forward, _ = names_of(options.kernel)
    if (saves_z and trains_by_pytorch(views, activation, options)) or decide_by_dtype(views.x, forward) is not None:
        launch, in_place = by_pytorch(activation, saves_z), False
    else:
        inputs = inputs_of(views, activation, saves_z)
        plan = plan_of(inputs, forward)
        made, in_place = plan.bind(inputs, shape), plan.by_address and _in_place(inputs.tensors, tensors)
        launch = made if in_place else lambda *given: made(*dense(Tensors(*given)))
    if in_place or saves_z:
        return launch
    return lambda *given: unviewed(launch(*views_of(Tensors(*given), options)), shape)


def bind_training(tensors: Tensors, options: Options) -> TrainingLaunch:
    """The launch for arguments like these with gradients, not by FALLBACK: bound again when PyTorch's switch for deterministic
    algorithms changes. Raises as ``fused_moe``."""
    steps = {torch.are_deterministic_algorithms_enabled(): _bind_step(tensors, options)}
    as_given = all(map(is_, views_of(tensors, options), tensors))

    def launch(given: Tensors, sums: Sums = NEW, pair: Pair | None = None) -> torch.Tensor:
        switch = torch.are_deterministic_algorithms_enabled()
        if switch not in steps:
            steps[switch] = _bind_step(given, options)
        if as_given:
            return steps[switch].served(given, sums, pair)
        return unviewed(steps[switch].served(views_of(given, options), sums, pair), given.x.shape)

    return launch


def _bind_step(tensors: Tensors, options: Options) -> Step:
    """The step of a call, its forward bound if the call may bypass PyTorch's dispatcher."""
    views, activation = checked(tensors, options)
    decide_training(views, activation, options)
    step = Step(activation, *names_of(options.kernel), options.recompute)
    if not is_plain(*tensors):
        return step
    of_views = options._replace(transposed=False, kernel=step.kernel if step.recompute else options.kernel, recompute=False)
    with torch.no_grad():
        return step._replace(launch=bind_call(views, of_views, saves_z=not step.recompute))


def bind_rows(tensors: Tensors, options: Options) -> Callable[..., Rows | None]:
    """The launch of a call like this without its last kernel: it returns the rows instead of their sums, or None if what serves
    ``fused_moe`` keeps no rows. Raises as ``fused_moe``."""
    (views, activation), shape = checked(tensors, options), tensors.x.shape
    if not views.x.shape[0] or decide_by_dtype(views.x, options.kernel) is not None:
        return lambda *given: None
    inputs = inputs_of(views, activation)
    unsummed, serving = replace(inputs, sums=False), plan_of(inputs, options.kernel).decision.kernel
    try:
        plan = None if serving == FALLBACK else plan_of(unsummed, serving)
    except CannotServe:
        plan = None
    if plan is None:
        return lambda *given: None
    made = plan.bind(unsummed, shape)
    if _in_place(inputs.tensors, tensors):
        return made
    return lambda *given: made(*dense(views_of(Tensors(*given), options)))


def decide_training(tensors: Tensors, activation: Activation, options: Options) -> Decision:
    """What serves the forward of a call with gradients; the reason also says what serves the backward. Raises as
    ``fused_moe``."""
    if options.kernel == FALLBACK:
        return Decision(FALLBACK, Config(), "asked for by name", "requested")
    if not tensors.x.shape[0]:
        return Decision(FALLBACK, Config(), "hidden_states has no tokens: nothing is computed", "required")
    forward, backward = names_of(options.kernel)
    chosen = choose_backward(tensors, activation, backward)
    decision = decide_by_dtype(tensors.x, forward)
    if decision is None and trains_by_pytorch(tensors, activation, options):
        decision = Decision(FALLBACK, Config(), "PyTorch's products serve both passes", chosen.basis)
    if decision is None:
        decision = plan_of(inputs_of(tensors, activation, not options.recompute), forward).decision
    by = f"{chosen.kernel}({chosen.config})" if chosen.config else chosen.kernel
    return replace(decision, reason=f"{decision.reason}; {GRADIENTS}, its backward by {by}: {chosen.reason}")


def trains_by_pytorch(tensors: Tensors, activation: Activation, options: Options) -> bool:
    """Whether PyTorch's products serve both passes: no kernel is asked for, and no record has a backward of ours faster."""
    if options.kernel is not None or options.recompute or options.weight_format is not None:
        return False
    return choose_backward(tensors, activation, None).kernel == FALLBACK_BACKWARD


def decide_by_dtype(x: torch.Tensor, kernel: str | None) -> Decision | None:
    """The decision for PyTorch's operators if no kernel of ours takes the dtype, else None. Raises as ``fused_moe``."""
    if x.dtype in DTYPES:
        return None
    return choose_fallback(MoEProblem.op, kernel, f"hidden_states has dtype {x.dtype}, which no kernel of ours takes")


def with_dequantising(decision: Decision, form: str | None) -> Decision:
    """The decision; its reason says so if quantised weights are dequantised first."""
    if form is None or decision.kernel != FALLBACK:
        return decision
    return replace(decision, reason=f"{decision.reason}; weights in {form} are dequantised before each product")


def _in_place(used: Tensors, given: Tensors) -> bool:
    """Whether a kernel's inputs have the addresses of the tensors of the call: none was copied on the way."""
    pairs = zip(used, given, strict=True)
    return all(here is None or here.data_ptr() == there.data_ptr() for here, there in pairs if there is not None)


def plan_of(inputs: MoEInputs, kernel: str | None) -> Plan:
    """The plan for such inputs. Raises as ``fused_moe``."""
    p, (x, w1, w2, *_), of_weights = inputs.problem, inputs.tensors, inputs.tensors[7:]
    key = (
        p.tokens if p in _measured() else rounded_up(p.tokens), p.experts, p.top_k, p.dim, p.hidden, place_of(x.device),
        x.stride(), w1.stride(), w2.stride(), *(None if one is None else (one.shape, one.stride()) for one in of_weights),
        inputs.activation, kernel, inputs.saves_z, inputs.sums,
        tuple(None if one is None else (one.dtype, one.data_ptr() % 16) for one in inputs.tensors),
    )  # fmt: skip
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS[key] = _make_plan(inputs, kernel)
    return plan


@cache
def _measured() -> frozenset[MoEProblem]:
    """Problems of the dispatch table: each is a class of its own, decided by its own record."""
    return frozenset(one.problem for one in known_table().entries if type(one.problem) is MoEProblem)


def _make_plan(inputs: MoEInputs, kernel: str | None) -> Plan:
    def bind(chosen: MoEKernel, config: Config) -> tuple[Bind, bool]:
        if chosen.load is not None:
            raise CannotServe("it is for measurements only: it prepares weights at load, and fused_moe takes a checkpoint's")
        if chosen.plan is None:
            check_sums_alone(inputs)
            return _bind_of_peer(chosen, config), False
        with torch.cuda.device_of(x):
            planned: Bind = chosen.plan(inputs, config)
        guard = device_guard(x.get_device())  # a launch may compile when it is bound
        return guard(lambda like, shape: guard(planned(like, shape))), True

    x, made = inputs.tensors.x, None
    decision = choose_fallback(MoEProblem.op, kernel, None)
    if decision is None:
        decision, made = choose(inputs.problem, gpu_of(x), kernel, bind)
    decision = with_dequantising(decision, inputs.problem.weight_format)
    return Plan(decision, *(made or (lambda like, shape: by_pytorch(like.activation, like.saves_z), False)))


def by_pytorch(activation: Activation, saves_z: bool) -> MoELaunch:
    """The experts by PyTorch's operators, from the tensors of kernels."""
    compute: Callable[..., Any] = saving_moe if saves_z else pytorch_moe
    return lambda *tensors: compute(Tensors(*tensors), activation)


def _bind_of_peer(kernel: MoEKernel, config: Config) -> Bind:
    def bind(like: MoEInputs, shape: Shape) -> MoELaunch:
        def launch(*tensors: Any) -> torch.Tensor:
            return kernel.run(MoEInputs(problem, Tensors(*tensors), activation), config)

        problem, activation = like.problem, like.activation
        return device_guard(like.tensors.x.get_device())(launch)

    return bind
