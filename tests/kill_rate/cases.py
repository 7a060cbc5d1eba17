"""The cases that judge the mutations of a module, plain ones first."""

import re
from dataclasses import replace

from conformance.subjects.kinds import HOOK
from tests.cases import Case
from tests.hooks_ref.test_certified import LOSSLESS, OURS

# Two ranks show most defects, and soonest; among two, hooks and gossip have one partner alone.
RANKS = 2
MORE_RANKS = 3
# The commands that use a module, by the names of their subjects or states.
USERS = {
    "default_hooks": ("allreduce_hook", "fp16_compress_hook", "fp16_wrapped", "bf16_wrapped"),
    "mixed_precision": ("mixed_float16", "mixed_bfloat16"),
    "compression": (
        "top_k",
        "top_k_later",
        "top_k_dgc",
        "random_k",
        "top_k_ef21",
        "qsgd",
        "encoded",
    ),
    "sparsification": ("top_k", "top_k_dgc", "random_k", "random_k_unbiased"),
    "sign": ("scaled_sign", "one_bit"),
    "stochastic": ("qsgd", "qsgd_4_bits", "terngrad", "terngrad_short"),
    "quantization": ("quantization_pertensor_hook", "quantization_perchannel_hook"),
    "low_rank": ("PowerSGDState", "power_sgd", "power_sgd_same_shapes", "power_sgd_fresh"),
    "local_sgd": ("pairs", "own"),
    "gossip": ("GossipGraDState",),
    "optimizer_overlap": (
        "sgd_in_the_hook",
        "adagrad_out_of_place",
        "adam_in_the_hook",
        "sgd_in_backward",
    ),
    "zero_overlap": ("zero_after_backward", "zero_interleaved"),
    "_buckets": (
        "encoded",
        "one_bit",
        "power_sgd",
        "qsgd_4_bits",
        "quantization_perchannel_hook",
        "sgd_in_the_hook",
        "adagrad_out_of_place",
    ),
    "_collectives": ("top_k", "one_bit", "power_sgd"),
    "_state": ("top_k_later", "random_k", "one_bit", "power_sgd"),
    "registration": (),
    "debugging_hooks": (),
    "model_averaging": (
        "PeriodicModelAverager",
        "HierarchicalModelAverager",
        "DiLoCoModelAverager",
        "PostLocalSGDOptimizer",
    ),
    "diloco": ("DiLoCoModelAverager", "OuterStepModelAverager"),
    "ema": ("EMAModelAverager",),
    "gossip_averaging": ("GossipModelAverager",),
    "post_local_sgd_optimizer": ("PostLocalSGDOptimizer",),
    "sync_strategies": ("ddp_sync_context", "GradientAccumulation"),
    "join": ("Join",),
    "quantized_collectives": ("auto_quantize",),
    "checkpointing": ("checkpoint_wrapper", "offload_wrapper"),
}
_POWER_SGD = (
    "compressed(ratio=0.039), warmup(2), like({}, matrix_approximation_rank=2, "
    "start_powerSGD_iter=2, min_compression_rate=1{})"
)
# The ``like`` claim of a subject, by the name of its state or hook; some options occur in no
# command of the README.
ALIKE = {
    "top_k": "compressed(ratio=0.501), like(TopK, ratio=0.25)",
    "top_k_later": "compressed(ratio=0.501), warmup(2), like(TopK, ratio=0.25, start_iter=2)",
    "top_k_dgc": "compressed(ratio=0.501), like(TopK, ratio=0.25, momentum=0.5)",
    "top_k_ef21": "compressed(ratio=0.501, feedback=ef21), like(TopK, ratio=0.25, memory='ef21')",
    "random_k": "compressed(ratio=0.251), like(RandomK, ratio=0.25)",
    "random_k_unbiased": (
        "unbiased(ratio=0.251), like(RandomK, ratio=0.25, unbiased=True, memory='none')"
    ),
    "scaled_sign": "compressed(ratio=0.032), like(ScaledSign)",
    "one_bit": "compressed(ratio=0.032), like(OneBit)",
    "qsgd": "unbiased(ratio=0.253), like(QSGD)",
    "qsgd_4_bits": "unbiased(ratio=0.188), like(QSGD, levels=7, block=16)",
    "terngrad": "unbiased(ratio=0.065), like(TernGrad)",
    "terngrad_short": "unbiased(ratio=0.163), like(TernGrad, block=10)",
    "power_sgd": _POWER_SGD.format("powerSGD_hook", ""),
    "power_sgd_same_shapes": _POWER_SGD.format(
        "powerSGD_hook", ", batch_tensors_with_same_shape=True"
    ),
    "power_sgd_fresh": _POWER_SGD.format(
        "powerSGD_hook", (", use_error_feedback=False, warm_start=False")
    ),
    "quantization_pertensor_hook": (
        "compressed(ratio=0.2505, feedback=False, delta=0.99), like(quantization_pertensor_hook)"
    ),
    "quantization_perchannel_hook": (
        "compressed(ratio=0.258, feedback=False, delta=0.99), like(quantization_perchannel_hook)"
    ),
}
# Cases for options that no command of the README uses. A rank's place in a topology shows with more
# than two ranks only.
# Rules 1.5 and 13.8 alone judge cases of this claim. An honest delta would make the run of 1.5 some
# thousand steps long.
_ROUGH = "compressed(delta=0.25), warmup(2)"
_LOW_RANK = ",start_powerSGD_iter=2,min_compression_rate={},matrix_approximation_rank={}"
_GOSSIP = "hooks_ref:gossip_grad_hook", "hooks_ref:GossipGraDState"
_LOSSLESS = [replace(case, worlds=(2,), rules=("1.5", "2.1", "2.2", "2.4")) for case in LOSSLESS]
_ALIKE_AVERAGERS = {
    "DiLoCoModelAverager": ("period=3, warmup_steps=2, lr=0.5, momentum=0.75",),
    "OuterStepModelAverager": ("period=3, lr=0.5, momentum=0.75",),
    "EMAModelAverager": ("decay=0.75, period=2, warmup_steps=3",),
    "GossipModelAverager": ("period=2, warmup_steps=1",),
}


def _averager(name: str, options: str, claims: str = "exact", world: int = RANKS) -> Case:
    target = f"hooks_ref:{name},{options.replace(', ', ',')}"
    return Case(target, claims, worlds=(world,), kind="averager")


def _averagers_alike(*names: str) -> list[Case]:
    """Return averagers with other arguments than those of the README, beside their originals."""
    return [
        _averager(
            name,
            options,
            f"like({name}, {options})",
            MORE_RANKS if name == "GossipModelAverager" else RANKS,
        )
        for name in names
        for options in _ALIKE_AVERAGERS[name]
    ]


def _own(kind: str, name: str, claims: str = "exact") -> Case:
    """Return a subject of ``subjects.py``."""
    return Case(f"tests.kill_rate.subjects:{name}", claims, worlds=(RANKS,), kind=kind)


# The members of DDPCommHookType that make a state: the hook and the rank of its matrices.
_POWER_SGD_BY_NAME = {
    "power_sgd": ("powerSGD_hook", 1),
    "power_sgd_rank2": ("powerSGD_hook", 2),
    "batched_power_sgd": ("batched_powerSGD_hook", 1),
    "batched_power_sgd_rank2": ("batched_powerSGD_hook", 2),
    "power_sgd_with_a_state": ("powerSGD_hook", 2),
}
MORE = {
    "compression": _LOSSLESS,
    "sparsification": _LOSSLESS,
    "local_sgd": [
        Case(
            "hooks_ref:post_localSGD_hook",
            state="examples.states:on_this_machine",
            worlds=(2, 3),
            rules=("1.5", "2.1", "2.7"),
        )
    ],
    "low_rank": [
        *(
            Case(
                f"hooks_ref:{hook}",
                f"{_ROUGH}, like({hook}{_LOW_RANK.format(*options)})",
                f"hooks_ref:PowerSGDState{_LOW_RANK.format(*options)}",
                worlds=(2,),
                rules=("1.5", "13.8"),
            )
            for hook, *options in (
                *(
                    ("powerSGD_hook", 1, 1),
                    ("powerSGD_hook", 4, 4),
                    ("batched_powerSGD_hook", 1, 2),
                ),
                *(
                    (hook, 1, "1,use_error_feedback=False")
                    for hook in ("powerSGD_hook", "batched_powerSGD_hook")
                ),
            )
        ),
        Case(
            "hooks_ref:powerSGD_hook",
            "compressed(feedback=False, delta=0.01), warmup(2)",
            f"hooks_ref:PowerSGDState{_LOW_RANK.format(1, 1)},use_error_feedback=False",
            worlds=(2,),
            rules=("1.5", "2.1", "2.5"),
        ),
    ],
    "optimizer_overlap": [
        Case(
            "examples.setups:descent_in_the_hook",
            "fused(SGD, lr=0.1)",
            setup=True,
            worlds=(2,),
            rules=("1.5", "13.6"),
        ),
    ],
    "_state": [
        Case(
            "hooks_ref:compression_hook",
            "compressed(delta=0.25), warmup(2)",
            "examples.states:top_k_later",
            worlds=(2,),
            rules=("1.5", "13.4"),
        ),
    ],
    "registration": [
        Case("examples.setups:by_name", "rounded(bfloat16)", setup=True, worlds=(2,)),
        *(
            Case(
                f"tests.kill_rate.subjects:{name}",
                f"{_ROUGH}, like({hook}{_LOW_RANK.format(1, rank)})",
                setup=True,
                worlds=(2,),
                rules=("1.5", "13.8"),
            )
            for name, (hook, rank) in _POWER_SGD_BY_NAME.items()
        ),
    ],
    "model_averaging": [
        _averager(
            "HierarchicalModelAverager", "period_group_size_dict={2:2,6:4},warmup_steps=3", world=4
        ),
    ],
    "diloco": _averagers_alike("DiLoCoModelAverager", "OuterStepModelAverager"),
    "ema": _averagers_alike("EMAModelAverager"),
    "gossip_averaging": [
        *_averagers_alike("GossipModelAverager"),
        _averager(
            "GossipModelAverager",
            "period=2,topology='hypercube'",
            "like(GossipModelAverager, period=2, topology='hypercube')",
            world=4,
        ),
    ],
    "post_local_sgd_optimizer": [],
    "sync_strategies": [_own("strategy", "all_of_the_model")],
    "checkpointing": [
        _own("wrapper", "with_its_own_function", "recomputes"),
        _own("wrapper", "inside_a_model", "recomputes"),
        _own("wrapper", "keeps_products"),
    ],
    "gossip": [
        Case(
            _GOSSIP[0],
            (f"local{warmup}, like(gossip_grad_hook{options})"),
            _GOSSIP[1] + options,
            worlds=(world,),
            rules=("1.5", "13.8"),
        )
        for world, warmup, options in (
            *((world, "", "") for world in (2, 3, 4)),
            (4, "", ",topology='hypercube'"),
            (4, ", warmup(2)", ",start_iter=2"),
        )
    ],
}


def cases_of(module: str, key: str) -> list[Case]:
    """Return the cases of a module.

    Args:
        module: the module of ``hooks_ref``.
        key: of the mutation; cases whose options name a part of it come first.
    """
    used = [
        replace(case, worlds=(_ranks(case),))
        for case in OURS
        for name in USERS[module]
        if name in (_name_of(case.target), _name_of(case.state or ""))
    ]
    alike = [_alike(name) for name in USERS[module] if name in ALIKE]
    cases = [*MORE.get(module, []), *alike, *used]
    words = set(re.findall(r"[A-Za-z0-9]+(?:_[A-Za-z0-9]+)*", key.lower()))
    return [_of_the_copy(case) for case in sorted(cases, key=lambda case: _distance(case, words))]


def _ranks(case: Case) -> int:
    """Return the number of ranks for a case of the README."""
    if 4 in case.worlds:
        return 4
    return MORE_RANKS if case.kind == HOOK or "Gossip" in case.target else RANKS


def _name_of(target: str) -> str:
    return target.partition(":")[2].partition(",")[0]


def _distance(case: Case, words: set[str]) -> int:
    """Return a number that is smaller the more options of a case the mutation names."""
    options = re.findall(r"\w+", case.target.partition(":")[2] if case.kind != HOOK else "")
    return -len(words.intersection(option.lower() for option in options))


def _of_the_copy(case: Case) -> Case:
    """Return a case with the subject of the mutated copy."""
    state = case.state and _renamed(case.state)
    return replace(case, target=_renamed(case.target), state=state)


def _renamed(text: str) -> str:
    text = text.replace("hooks_ref", "hooks_mutated").replace("examples.", "examples_mutated.")
    return text.replace("tests.kill_rate.subjects", "subjects_mutated")


def _alike(name: str) -> Case:
    """Return the subject of that name, compared with its own original."""
    if name.endswith("_hook"):
        return Case(f"hooks_ref:{name}", ALIKE[name], worlds=(2,), rules=("1.5", "13.7", "13.8"))
    hook = "powerSGD_hook" if name.startswith("power_sgd") else "compression_hook"
    return Case(
        f"hooks_ref:{hook}",
        ALIKE[name],
        f"examples.states:{name}",
        worlds=(2,),
        rules=("1.5", "13.7", "13.8"),
    )
