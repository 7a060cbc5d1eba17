"""The driver of sync strategies: trains in micro-batches, each inside the strategy's context."""

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from conformance.errors import TargetError
from conformance.ranks.drivers._backwards import (
    break_off,
    change_gradient_dtypes,
    exception_of,
    fail_early,
    give_gradient_dtypes,
    has_other_strides,
    run_backwards,
)
from conformance.ranks.drivers._cleared_gradients import clear_gradients
from conformance.ranks.drivers._set_aside import SetAside
from conformance.ranks.drivers._strategy_contexts import described, require_context
from conformance.ranks.drivers._strategy_gradients import Grads, gradients_of
from conformance.ranks.drivers._trainers_own import (
    CountingOptimizer,
    TrainersOwn,
    make_optimizers,
    own_calls_of,
    set_rates,
    set_values,
    steps_of,
)
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.models.buffered import BufferedProbe, set_modes
from conformance.ranks.models.flat_buffers import FlatBuffers
from conformance.ranks.models.nested import nest
from conformance.ranks.models.probe import Probe
from conformance.ranks.models.reused_memory import ReusedMemory
from conformance.ranks.models.reused_places import made_in_place
from conformance.ranks.resolve import Context, Factory, missing_arguments
from conformance.records.files import MODEL_MADE
from conformance.scenarios.arrival import arrival_order
from conformance.scenarios.buffer_forms import has_buffers
from conformance.scenarios.model import Param
from conformance.scenarios.model_buffers import update_of
from conformance.scenarios.strategy import ACCUMULATED, FORMS
from conformance.scenarios.strategy_breaks import AFTER, way_of_break
from conformance.scenarios.strategy_evaluations import Evaluation, evaluations
from conformance.scenarios.strategy_passes import ALTERNATING, FORWARDS_FIRST, Passes, passes_of
from conformance.scenarios.strategy_schedule import (
    ZEROED,
    abandoned_after,
    added,
    batches,
    by_itself,
    clears,
    clears_inside,
    count_of,
    fails_and_goes_on,
    has_forward_alone,
    is_empty,
    is_frozen,
    is_last,
    nested_of_two,
    puts_own_steps,
    raised_in,
    raises_in,
    steps_before,
    turns,
    uses,
)
from conformance.scenarios.strategy_step_ends import optimizers_step
from conformance.scenarios.strategy_swaps import Swap, swap_of
from conformance.scenarios.strategy_training import AFTER_WORLD, FREEZING, GRADIENT_DTYPES, UNFROZEN
from conformance.scenarios.strategy_uses import fails_among_two, models_of

LONG_RUN = 100  # steps


class StrategyDriver(RankDriver):
    """One rank that trains with a sync strategy.

    Attributes:
        strategy: the subject.
        model: the probe, under DDP unless the scenario does without.
        probe: the model that gives the scenario's gradients.
        params: the probe's parameters.
        optimizers: the optimizers that the strategy may be given.
        every_optimizer: all optimizers of the model, which may take turns.
        buffers: the flat buffers of the parameters and of their gradients, if there are any.
        specs: the parameters of the scenario, with the dtypes of their gradients in this step.
        passes: the backward passes of a micro-batch.
        own: the things of the trainer that the strategy has to leave as they are.
    """

    model: torch.nn.Module
    probe: Probe
    params: list[torch.nn.Parameter]
    buffers: list[FlatBuffers]
    specs: tuple[Param, ...]
    passes: Passes
    optimizers: list[CountingOptimizer]
    every_optimizer: list[CountingOptimizer]
    own: TrainersOwn

    def run(self) -> None:
        """Make the strategy and run the scenario's steps."""
        self.strategy: Callable[..., Any] = self.make()
        if not callable(self.strategy):
            raise TargetError(
                "a sync strategy is called for each micro-batch, and returns a context manager; "
                f"this is {described(self.strategy)}"
            )
        if self.scenario.variant == AFTER_WORLD.variant:
            self._make_model(*self._train_on_world())
        elif self.scenario.twin_groups:
            self._rewrap()
        else:
            self._make_model()
        if models_of(self.scenario) > 1:
            self._run_two()
            return
        self.collectives.take_sent()  # of DDP, as it was made
        aside = SetAside()
        # DDP's buckets, and the flat buffers of a trainer, are written in every step, and so are
        # gradients that the trainer clears by zeros.
        is_free = not (self.scenario.ddp.gradient_as_bucket_view or self.buffers)
        is_free = is_free and self.scenario.variant not in (UNFROZEN.variant, ZEROED)
        # After the first quarter of a long run nobody keeps gradients: new ones get the memory of
        # old ones. Their storages are more objects; growth is judged from a third of the run on.
        count = len(self.scenario.steps)
        until = count // 4 if count >= LONG_RUN else count
        self.own_keepers = (aside,)
        for step, kind in enumerate(self.scenario.steps):
            self.begin_step(step, kind)
            if step == until:
                aside = SetAside()
                self.probe.memory = ReusedMemory()
                self.own_keepers = (self.probe.memory,)
            elif is_free and clears(self.scenario, step) and step < until:
                aside.take(self.params)
            self._step(step)
            if changed := aside.changed():
                self.recorder.event("aside_changed", parameters=changed)
            self._keep_gradients()

    def _made(self, target: Factory, context: Context) -> Any:
        if count_of(self.scenario) and isinstance(target.function, type):
            # A count would begin anew if there were an object for each micro-batch.
            return target.make(context)
        return super()._made(target, context)

    def _train_on_world(self) -> tuple[Probe, DistributedDataParallel]:
        """Train another model on WORLD; its gradients are not judged.

        Returns:
            Empty objects in the memory of that model, which is gone: without DDP and with it.
        """
        self._make_model(group=torch.distributed.group.WORLD)
        self._train_unjudged()
        places = (id(self.probe), id(self.model))
        del self.probe, self.model, self.params, self.optimizers, self.every_optimizer, self.own
        # Nothing but the subject keeps the model.
        gc.collect()
        return made_in_place(Probe, places[0]), made_in_place(DistributedDataParallel, places[1])

    def _train_unjudged(self) -> None:
        """Train a step whose gradients are not judged."""
        self.begin_step(0, self.scenario.steps[0])
        # A strategy may make something for each model, or for its group.
        self.recorder.event("made", objects=1)
        self._clear(0)
        number = batches(self.scenario, 0)
        for batch in range(number):
            grads = self._grads(0, batch)
            self._update = update_of(self.scenario, self.group_rank, 0, batch)
            with self.inside("the context"):
                self._train(grads, batch == number - 1)

    def _rewrap(self) -> None:
        """Train a network on WORLD and on other subgroups, and wrap it anew on this rank's own."""
        self._make_model(group=torch.distributed.group.WORLD)
        for steps, next_group in zip(
            steps_before(self.scenario), (self.twin_group, self.group), strict=True
        ):
            for _ in range(steps):
                self._train_unjudged()
            self.model = self.probe
            # DDP's hooks on the network go with it.
            gc.collect()
            if isinstance(self.probe, BufferedProbe):
                self.probe.clear_buffers()
            self.model = self._in_ddp(self.probe, next_group)

    def _run_two(self) -> None:
        """Train two models whose micro-batches alternate; even steps are those of the first."""
        models = []
        for _ in range(2):
            models.append((self.model, self.params, self.optimizers, self.own))
            self._make_model()
        for step in range(0, len(self.scenario.steps), 2):
            self.begin_step(step, self.scenario.steps[step])
            for number, (model, params, optimizers, _) in enumerate(models):
                clear_gradients(self.scenario, step + number, model, optimizers, params)
            for place, together in enumerate(nested_of_two(self.scenario, step)):
                if (step, place) == fails_among_two(self.scenario):
                    number, batch = together[0]
                    self.model, self.params, self.optimizers, self.own = models[number]
                    with self.inside("the context"):
                        context = self._context_of(is_last(self.scenario, step + number, batch))
                        forward = partial(self.model, self._grads(step + number, batch))
                        fail_early(context, forward, exception_of(raised_in(self.scenario, step)))
                with self.inside("the context"), contextlib.ExitStack() as contexts:
                    given = []
                    for number, batch in together:
                        self.model, self.params, self.optimizers, self.own = models[number]
                        given.append(self._grads(step + number, batch))
                        contexts.enter_context(
                            self._context_of(is_last(self.scenario, step + number, batch))
                        )
                    for (number, batch), grads in zip(together, given, strict=True):
                        self.model, self.params, self.optimizers, self.own = models[number]
                        self._update = update_of(
                            self.scenario, self.group_rank, step + number, batch
                        )
                        self._pass_through(grads)
            for number in range(2):
                self.model, self.params, self.optimizers, self.own = models[number]
                self.begin_step(step + number, self.scenario.steps[step + number])
                self._keep_gradients()

    def _make_model(
        self,
        probe: Probe | None = None,
        ddp: DistributedDataParallel | None = None,
        group: Any = None,
    ) -> None:
        """Make the model and its optimizers.

        Args:
            probe: an object to make the model of; by default it is a new one.
            ddp: an object to make DDP of; by default it is a new one.
            group: of the model; by default that of the scenario.
        """
        scenario = self.scenario
        made = BufferedProbe if has_buffers(scenario) else Probe
        probe = made.__new__(made) if probe is None else probe
        made.__init__(probe, scenario.params, scenario.initial_value, self.rank)
        if isinstance(probe, BufferedProbe):
            probe.add_buffers(scenario)
        probe.to(self.device)
        self.probe = probe
        self.params = probe.tensors
        self.model = probe
        self.specs = scenario.params
        self.passes = Passes()
        if scenario.variant == GRADIENT_DTYPES.variant:
            changed = give_gradient_dtypes(scenario, self.params)
            self.recorder.event("gradient_dtypes", parameters=changed)
        self.buffers = self._flattened() if scenario.variant == "flat" else []
        set_values(self.params, seed := f"{scenario.session_seed}/{scenario.name}")
        if scenario.variant == FORMS.variant:
            nest(probe, seed)
        if scenario.variant != "no_ddp":
            self.model = self._in_ddp(probe, group, ddp)
        self.optimizers = self.every_optimizer = make_optimizers(scenario, self.params)
        self.own = TrainersOwn(probe, self.params, self.every_optimizer)
        self.hook_calls = [0] * len(self.params)
        if scenario.variant == ACCUMULATED.variant:
            for index, parameter in enumerate(self.params):
                parameter.register_post_accumulate_grad_hook(partial(self._count_hook_call, index))

    def _count_hook_call(self, index: int, _: torch.Tensor) -> None:
        self.hook_calls[index] += 1

    def _in_ddp(
        self, probe: Probe, group: Any = None, made: DistributedDataParallel | None = None
    ) -> torch.nn.Module:
        options = self.scenario.ddp
        if group is None and self.scenario.groups:
            group = self.group
        with self.doing(MODEL_MADE):
            return self.data_parallel(
                probe,
                made,
                process_group=group,
                bucket_cap_mb=options.bucket_cap_mb,
                gradient_as_bucket_view=options.gradient_as_bucket_view,
                find_unused_parameters=options.find_unused_parameters,
                broadcast_buffers=options.broadcast_buffers,
            )

    def _flattened(self) -> list[FlatBuffers]:
        """Make the parameters views of flat buffers, and return these and those of gradients."""
        seed = f"{self.scenario.session_seed}/{self.scenario.name}"
        of_params = FlatBuffers(self.params, f"{seed}/parameters", self.rank)
        for parameter, view in zip(self.params, of_params.views, strict=True):
            parameter.data = view
        return [of_params, FlatBuffers(self.params, f"{seed}/gradients", self.rank)]

    def _swap(self, swap: Swap, step: int) -> None:
        """Put parameters in the place of others, if this is the step."""
        if step == swap.renewed_at:
            for index in swap.renewed:
                # The list is the probe's own.
                self.params[index] = torch.nn.Parameter(self.params[index].detach().clone())
                self.probe.register_parameter(f"p{index}", self.params[index])
            self.own.trainer_replaced()
            self.model = self._in_ddp(self.probe)
            self.collectives.take_sent()
        if step in (swap.step, swap.renewed_at):
            absent = swap.unused(step)
            present = [p for index, p in enumerate(self.params) if index not in absent]
            self.optimizers[0].param_groups[0]["params"] = present

    def _step(self, step: int) -> None:
        """Train one step: its micro-batches, or those until one fails."""
        number = batches(self.scenario, step)
        self.probe.arrival = arrival_order(self.scenario, step, self.rank)
        if swap := swap_of(self.scenario):
            self._swap(swap, step)
        if step in puts_own_steps(self.scenario):
            for optimizer in self.every_optimizer:
                optimizer.put_own_step()
        set_rates(self.scenario, step, self.every_optimizer)
        if isinstance(self.probe, BufferedProbe):
            set_modes(self.model, self.probe, self.scenario, step)
            self.own.trainer_set_modes()
        if self.scenario.variant == "turns":
            self.optimizers = [self.every_optimizer[at] for at in turns(self.scenario, step)]
        clears_later = clears_inside(self.scenario, step)
        if clears(self.scenario, step) and not clears_later:
            self._clear(step)
        self.specs = change_gradient_dtypes(self.scenario, step, self.params)
        views = self.buffers[1].views if self.buffers else []  # gradients accumulate in them
        for parameter, view in zip(self.params, views, strict=False):
            parameter.grad = view.zero_()
        first_step, later = added(self.scenario)
        if later and step == first_step:
            params = [self.params[index] for index in sorted(later)]
            self.optimizers[0].add_param_group({"params": params})
        evaluation = evaluations(self.scenario).get(step)
        for batch in range(number):
            self._set_frozen(step, batch)
            if evaluation and batch == (number - 1 if evaluation.within_step else 0):
                self._evaluate(evaluation, self._grads(step, batch))
            if batch == abandoned_after(self.scenario, step):
                self._clear(step + 1)
                break
            self._update = update_of(self.scenario, self.group_rank, step, batch)
            self.passes = passes_of(self.scenario, step, batch)
            grads = self._grads(step, batch)
            # Outside of the context DDP averages as ever, whatever the strategy has left behind.
            if by_itself(self.scenario, step):
                self.model(grads).backward()
                continue
            fails = raises_in(self.scenario, step) == batch
            goes_on = fails_and_goes_on(self.scenario, step) == batch
            is_final = is_last(self.scenario, step, batch)
            with self.inside("the context"):
                if fails or goes_on:
                    self._fail(grads, batch, is_final)
                elif is_empty(self.scenario, self.size, self.group_rank, step, batch):
                    with self._context_of(is_final):
                        place = (self.size, self.group_rank, step, batch)
                        if has_forward_alone(self.scenario, *place):
                            self._forward(grads)
                        # Otherwise there is no input, and so neither a forward nor a backward.
                        self.let_peers_in()
                else:
                    self._train(grads, is_final, clears_later and batch == 0)
            if fails:
                self._clear(step + 1)
                break

    def _clear(self, step: int) -> None:
        """Clear the gradients before a step."""
        clear_gradients(self.scenario, step, self.model, self.every_optimizer, self.params)

    def _evaluate(self, evaluation: Evaluation, grads: Grads) -> None:
        """Run forwards of the model outside of the strategy's contexts, without gradients."""
        if not evaluation.is_on(self.group_rank, self.size):
            return
        evaluated = self.probe if evaluation.is_of_one_rank else self.model
        modes = [(module, module.training) for module in self.model.modules()]
        if evaluation.changes_mode:
            evaluated.eval()
        with self.inside("an evaluation"), torch.no_grad():
            for _ in range(evaluation.forwards):
                evaluated(grads)
        for module, is_training in modes:
            module.training = is_training

    def _set_frozen(self, step: int, batch: int) -> None:
        """Freeze parameters for a micro-batch, or thaw them, if the scenario does that."""
        if self.scenario.variant in (FREEZING.variant, UNFROZEN.variant):
            for index, parameter in enumerate(self.params):
                parameter.requires_grad_(not is_frozen(self.scenario, step, batch, index))
            self.own.trainer_froze()

    def _keep_gradients(self) -> None:
        """Record the gradients at the end of a step."""
        sent = self.collectives.take_sent()
        for index, parameter in enumerate(self.params):
            if parameter.grad is not None:
                self.keep(f"grad/p{index}", parameter.grad)
        if has_buffers(self.scenario):
            for name, buffer in self.model.named_buffers():
                self.keep(f"buffer/{name.rpartition('.')[2]}", buffer)
        if any(buffers.gaps_changed() for buffers in self.buffers):
            self.recorder.event("gap_change")
        changed = self.own.changed()
        steps_taken = None
        if optimizers_step(self.scenario, self.recorder.step):
            with self.doing("optimizer.step()"):
                steps_taken = steps_of(self.optimizers)
        self.recorder.event(
            "synchronised",
            without=[index for index, p in enumerate(self.params) if p.grad is None],
            strides_changed=[index for index, p in enumerate(self.params) if has_other_strides(p)],
            synchronises=getattr(self.model, "require_backward_grad_sync", True),
            sent=[len(sent), sum(size for _, size in sent)],
            gradients=sum(p.numel() * p.element_size() for p in self.params),
            hook_calls=self.hook_calls,
            changed=changed,
            steps_taken=steps_taken,
            own_steps=own_calls_of(self.optimizers),
        )
        self.hook_calls = [0] * len(self.params)

    def _train(self, grads: Grads, is_final: bool, clears_first: bool = False) -> None:
        with self.autocast(), self._context_of(is_final):
            for _ in range(self.passes.count if self.passes.way == ALTERNATING else 1):
                self._pass_through(grads, clears_first)

    def _pass_through(self, grads: Grads, clears_first: bool = False) -> None:
        """Run a forward and its backward passes, inside the context.

        Args:
            grads: the gradients that a backward gives.
            clears_first: clear the gradients of the last step between the two, as many loops do.
        """
        forwards = self.passes.count if self.passes.way == FORWARDS_FIRST else 1
        losses = [self._forward(grads) for _ in range(forwards)]
        if clears_first:
            self._clear(self.recorder.step)
        # DDP that synchronises by itself waits for peers in its backward, where no schedule sees
        # the wait.
        if getattr(self.model, "require_backward_grad_sync", False):
            self.let_peers_in()
        run_backwards(self.passes, losses, self.params)

    def _forward(self, grads: Grads) -> torch.Tensor:
        arguments = (self._update,) if isinstance(self.probe, BufferedProbe) else ()
        loss: torch.Tensor = self.model(grads, *arguments)
        return loss

    def _fail(self, grads: Grads, batch: int, is_final: bool) -> None:
        """Raise inside the context, as the scenario has it; in the last micro-batch, at its end."""
        step = self.recorder.step
        raised = exception_of(raised_in(self.scenario, step))("this micro-batch failed")
        goes_on = fails_and_goes_on(self.scenario, step) == batch
        way = AFTER if is_final and not goes_on else way_of_break(self.scenario, step)
        place = (self.size, self.group_rank, step, batch)
        made = {at: one for at, one in enumerate(self.params) if uses(self.scenario, *place, at)}
        caught: BaseException | None = None
        try:
            with self._context_of(is_final):
                break_off(way, self._forward, grads, made, raised)
        except BaseException as error:
            caught = error
        text = "nothing" if caught is None else f"{type(caught).__name__}: {str(caught)[:200]}"
        self.recorder.event("failed", same=caught is raised, came=text)

    def _context_of(self, is_final: bool) -> Any:
        """Return the strategy's context for one micro-batch."""
        names: Context = {
            "model": lambda: self.model,
            "is_final_microbatch": lambda: is_final,
            "optimizers": lambda: list(self.optimizers),
            "state": lambda: SimpleNamespace(model=self.model, optimizers=list(self.optimizers)),
            **self.context,
        }
        if missing := missing_arguments(self.strategy, names):
            raise TargetError(
                f"the strategy requires {', '.join(missing)}; a micro-batch has {', '.join(names)}"
            )
        context = self.call(self.strategy, names)
        require_context(context, self.strategy)
        return context

    def _grads(self, step: int, batch: int) -> Grads:
        """Return the gradients of a micro-batch; None for the parameters that it does not use."""
        ranks = torch.distributed.get_process_group_ranks(self.group)
        part = (step, batch)
        return gradients_of(self.scenario, self.specs, ranks, self.group_rank, part, self.device)
