"""Weights that are held between forwards without gradients: counted bytes, the same bits, and memory that is given back."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from engine_runs import Training, assert_equal_states, attach
from pairs import long_unless
from peft import LoraConfig, get_peft_model
from plain_torch import tiny_model, token_batches
from torch import nn
from transformers import DynamicCache, StaticCache, T5Config, T5ForConditionalGeneration

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.layers.caches import cache_bytes
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.plan import evaluation_weights
from megatrain_accelerate.plan.evaluation_weights import is_next_token
from megatrain_accelerate.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("profiled_once")

TOKENS = 12
PROMPT = token_batches(1, batch=2, length=5)[0]


def layer_bytes(engine: Engine) -> int:
    return sum(layer.unit.layout.weight_bytes for layer in engine.runtime.layers)


def held(engine: Engine) -> int:
    """Layers that are on the device for a while."""
    runtime = engine.runtime
    return runtime.prefetcher.held_bytes // runtime.layers[0].unit.layout.weight_bytes


def generate(model: nn.Module, tokens: int = TOKENS, **options: Any) -> torch.Tensor:
    model.eval()
    model.generation_config.pad_token_id = 0
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    return model.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, **{**length, **options})


def fetched(engine: Engine, body: Callable[[], Any]) -> int:
    """Bytes of layers' weights that the body brings to the device."""
    before = engine.runtime.meter.counters.h2d_bytes
    body()
    return engine.runtime.meter.counters.h2d_bytes - before


@pytest.fixture
def engines() -> Iterator[Callable[..., tuple[nn.Module, Engine]]]:
    """Makes models of 6 equal layers with their engines, closed at the end."""
    made: list[Engine] = []

    def make(**settings: Any) -> tuple[nn.Module, Engine]:
        model = tiny_model(num_hidden_layers=6)
        made.append(attach(model, **settings))
        return model, made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize(("setting", "fetches"), [("stream", TOKENS), ("resident", 1)])
def test_generating_fetches_each_layer_once_instead_of_once_a_token(engines: Any, setting: str, fetches: int) -> None:
    model, engine = engines(evaluation_weights=setting)
    texts = []
    counted = fetched(engine, lambda: texts.append(generate(model)))
    # The two shared slots are filled ahead of a token that doesn't come.
    slack = layer_bytes(engine) // 6 * 2 if setting == "stream" else 0
    assert abs(counted - fetches * layer_bytes(engine)) <= slack
    again = fetched(engine, lambda: texts.append(generate(model)))
    assert abs(again - (fetches * layer_bytes(engine) if setting == "stream" else 0)) <= slack
    plain, _ = engines(evaluation_weights="stream")
    assert torch.equal(texts[0], generate(plain))
    assert torch.equal(texts[0], texts[1])


def test_auto_holds_what_fits_the_budget_from_a_generations_first_forward_on_or_the_second_of_others(engines: Any) -> None:
    model, engine = engines(evaluation_weights="auto", gpu_memory_gib=1)
    counted = fetched(engine, lambda: generate(model))
    assert held(engine) == 6
    assert counted == layer_bytes(engine)
    assert fetched(engine, lambda: generate(model)) == 0
    engine.device_plan.evaluation_weights.give_up()
    with torch.no_grad():
        for count in (0, 6):
            model(input_ids=PROMPT, use_cache=False)
            assert held(engine) == count


def test_auto_holds_nothing_where_memory_is_not_planned_with(engines: Any) -> None:
    model, engine = engines(evaluation_weights="auto")
    generate(model)
    assert held(engine) == 0


def spare_layers(monkeypatch: pytest.MonkeyPatch, engine: Engine, count: float) -> None:
    """There is room for so many layers beside the two slots, the embeddings, and an evaluation of 1 MiB."""
    plan = engine.device_plan
    monkeypatch.setattr(evaluation_weights, "evaluation_bytes", lambda *_: (MIB, 0))
    one = layer_bytes(engine) // 6
    taken = sum(plan.budget.held_bytes_by_kind().values()) - held(engine) * one
    monkeypatch.setattr(plan.budget, "whole_bytes", lambda: int(taken + MIB + count * one))
    monkeypatch.setattr(type(plan.budget), "exists", True)


@pytest.mark.parametrize("setting", ["auto", "resident"])
def test_as_many_layers_are_held_as_fit(
    engines: Any, setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, engine = engines(evaluation_weights=setting)
    whole, _ = engines(evaluation_weights="stream")
    spare_layers(monkeypatch, engine, 3.9)  # the caches of PROMPT take less than a half
    text = generate(model)
    assert held(engine) == 3
    streamed = fetched(engine, lambda: generate(model))
    assert 0 < streamed <= (3 * TOKENS + 2) * layer_bytes(engine) // 6, "three of six layers stream"
    assert torch.equal(text, generate(whole))
    assert ("3 of 6 layers" in caplog.text) == (setting == "resident")


def test_layers_are_given_up_one_by_one_when_memory_runs_short(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = engines(evaluation_weights="resident")
    whole, _ = engines(evaluation_weights="stream")
    spare_layers(monkeypatch, engine, 7)
    ids = token_batches(1)[0]
    with torch.no_grad():
        reference = whole.eval()(input_ids=ids).logits
        model.eval()
        counts = []
        for room in (7, 3.5, 2.5, 7, -2):
            spare_layers(monkeypatch, engine, room)
            assert torch.equal(model(input_ids=ids).logits, reference)
            counts.append(held(engine))
    # What was given up isn't taken again before a model trains: memory that comes and goes would make it swing.
    assert counts == [6, 3, 2, 2, 0]


def test_a_growing_cache_makes_layers_leave(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = engines(evaluation_weights="resident")
    one = layer_bytes(engine) // 6
    spare_layers(monkeypatch, engine, 6.2)
    counts: list[int] = []
    for layer in engine.runtime.layers:
        layer.module.register_forward_pre_hook(lambda *_: counts.append(held(engine)))
    # Keys and values of 2 samples, 2 heads of 16, 6 layers, 4 bytes or 2: 240 tokens take more than a layer.
    generate(model, 240)
    assert counts[0] == 6
    assert counts[-1] < 6
    assert counts == sorted(counts, reverse=True)
    assert one < 240 * 2 * 2 * 2 * 16 * 6 * 2


@pytest.mark.parametrize("make_cache", [DynamicCache, functools.partial(StaticCache, max_cache_len=128)])
def test_layers_are_held_beside_the_cache_that_a_prompt_fills(
    engines: Any, monkeypatch: pytest.MonkeyPatch, make_cache: Callable[..., Any]
) -> None:
    model, engine = engines(evaluation_weights="auto")
    ids, cache = token_batches(1, batch=4, length=96)[0], make_cache(config=model.config)
    inputs = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
    plan, one = engine.device_plan, layer_bytes(engine) // 6
    needed, filled = evaluation_weights.evaluation_bytes(model, engine.runtime, inputs, engine.device)
    assert cache.get_seq_length() == 0, "what was predicted is a copy"
    room = {"left": int(needed + 2 * filled + 3.5 * one)}
    monkeypatch.setattr(plan.budget, "left_bytes", lambda: room["left"] - held(engine) * one)
    with torch.no_grad():
        model(**inputs)
        assert cache_bytes(inputs) == filled > 2 * one
        assert held(engine) == 3
        room["left"] -= filled  # as the allocator tells on a GPU
        model(**{**inputs, "input_ids": ids[:, :1]})
    assert held(engine) == 3, "the next token gives none up, and takes no more"


PLACED = [{}, {"kept_layers": 2, "offloaded_layers": 2}, {"device_layers": 1}]


@pytest.mark.parametrize(
    ("settings", "schedule"),
    long_unless(
        [(PLACED[0], "deferred"), (PLACED[1], "backward"), (PLACED[2], "deferred")],
        itertools.product(PLACED, ["deferred", "backward"]),
    ),
)
def test_training_after_it_is_bit_equal_to_training_without_it(settings: Any, schedule: str) -> None:
    states, losses = [], []
    for kind in ("none", "stream", "resident"):
        model = tiny_model(num_hidden_layers=6)
        engine = attach(model, evaluation_weights="stream" if kind == "none" else kind, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        run = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, schedule))
        found = []
        for position, ids in enumerate(token_batches(4)):
            if kind != "none" and position:
                generate(model, 3)
                fixed = settings.get("device_layers", 0)
                assert held(engine) == (0 if kind == "stream" else 6 - fixed)
                model.train()
            found.append(run.step(ids, max_norm=1.0 if schedule == "deferred" else None))
            assert held(engine) == 0
        losses.append(found)
        states.append(run.state())
        engine.close()
    assert losses[0] == losses[1] == losses[2]
    assert_equal_states(states[1], states[0])
    assert_equal_states(states[2], states[0])


def test_a_step_is_seen_by_the_next_evaluation(engines: Any) -> None:
    model, engine = engines(evaluation_weights="resident")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    ids = token_batches(1)[0]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert held(engine) == 6
    run.step(ids)
    with torch.no_grad():
        assert not torch.equal(model(input_ids=ids).logits, before)
        trained = model(input_ids=ids).logits
    plain = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, trained)


@pytest.mark.parametrize("device_layers", [0, 2])
def test_layers_are_fetched_ahead_in_the_first_training_forward_after_it(
    engines: Any, monkeypatch: pytest.MonkeyPatch, device_layers: int
) -> None:
    model, engine = engines(evaluation_weights="resident", device_layers=device_layers)
    ids = token_batches(1)[0]
    with torch.no_grad():
        for _ in range(3):
            model.eval()(input_ids=ids)
    prefetcher, expected = engine.runtime.prefetcher, []
    acquire = prefetcher.acquire

    def noting(layer: Any, upcoming: Any, *how: Any) -> Any:
        expected.append(list(upcoming))
        return acquire(layer, upcoming, *how)

    monkeypatch.setattr(prefetcher, "acquire", noting)
    model.train()(input_ids=ids)
    assert [upcoming[:1] for upcoming in expected[:5]] == [[1], [2], [3], [4], [5]]


def in_place(model: nn.Module) -> Callable[[nn.Parameter], None]:
    return lambda parameter: parameter.mul_(1.5)  # type: ignore[return-value]


def through_an_alias(model: nn.Module) -> Callable[[nn.Parameter], None]:
    aliases = {id(parameter): parameter.detach() for parameter in model.parameters()}
    return lambda parameter: aliases[id(parameter)].mul_(1.5)  # type: ignore[return-value]


def through_the_state_dict(model: nn.Module) -> Callable[[nn.Parameter], None]:
    names, states = {id(parameter): name for name, parameter in model.named_parameters()}, model.state_dict()
    return lambda parameter: states[names[id(parameter)]].mul_(1.5)


def by_other_data(model: nn.Module) -> Callable[[nn.Parameter], None]:
    def write(parameter: nn.Parameter) -> None:
        parameter.data = 1.5 * parameter.data

    return write


@pytest.mark.parametrize("writing", [in_place, through_an_alias, through_the_state_dict, by_other_data])
def test_a_write_to_held_weights_is_seen_by_the_next_forward(engines: Any, writing: Any) -> None:
    ids = token_batches(1)[0]
    logits = []
    for setting in ("stream", "resident"):
        model, engine = engines(evaluation_weights=setting)
        model.eval()
        write = writing(model)
        with torch.no_grad():
            before = [model(input_ids=ids).logits for _ in range(3)][-1]
            assert held(engine) == (6 if setting == "resident" else 0)
            write(model.model.layers[2].mlp.up_proj.weight)
            logits.append(model(input_ids=ids).logits)
        assert not torch.equal(logits[-1], before)
    assert torch.equal(*logits)


@pytest.mark.parametrize("device_layers", [0, 2, -1])
def test_held_layers_run_as_plain_modules_do(engines: Any, device_layers: int) -> None:
    model, engine = engines(evaluation_weights="resident", device_layers=device_layers)
    plain = copy.deepcopy(model).eval()
    model.eval()
    with torch.no_grad():
        expected = plain(input_ids=PROMPT).logits
        assert all(torch.equal(model(input_ids=PROMPT).logits, expected) for _ in range(3))
    assert torch.equal(generate(model), generate(plain))
    seen: list[Any] = []
    model.model.layers[3].register_forward_hook(lambda module, *_: seen.append(next(module.parameters())))
    model.model.layers[3].register_forward_pre_hook(lambda module, *_: seen.append(next(module.parameters())))
    fetched(engine, lambda: generate(model, 2))
    assert all(type(parameter) is nn.Parameter for parameter in seen), "users' hooks see the layer's own parameters"


def test_a_write_between_two_tokens_is_seen_by_the_sixteenth_at_the_latest(engines: Any) -> None:
    model, _ = engines(evaluation_weights="resident")
    ids, losses = PROMPT[:, :1], []
    for writes in (False, True):
        with torch.no_grad():
            cache = model.eval()(input_ids=PROMPT, use_cache=True).past_key_values
            logits = []
            for token in range(20):
                logits.append(model(input_ids=ids, past_key_values=cache).logits)
                if writes and token == 1:
                    model.model.layers[2].mlp.up_proj.weight.mul_(1.5)
        losses.append(logits)
    assert torch.equal(losses[0][1], losses[1][1])
    assert not torch.equal(losses[0][16], losses[1][16])


def test_a_training_forward_of_the_inner_model_gives_the_memory_back(engines: Any) -> None:
    # Losses that never make all logits call the model without its head, so that no hook on the model runs.
    model, engine = engines(evaluation_weights="resident")
    with torch.no_grad():
        model(input_ids=PROMPT)
    assert held(engine) == 6
    model.model(input_ids=PROMPT).last_hidden_state.sum().backward()
    assert held(engine) == 0


def test_another_model_that_computes_gets_the_memory(engines: Any) -> None:
    policy, engine = engines(evaluation_weights="resident")
    reference, other = engines(evaluation_weights="auto", gpu_memory_gib=1)
    with torch.no_grad():
        for _ in range(3):
            policy(input_ids=PROMPT)
            assert held(engine) == 6
            reference(input_ids=PROMPT)
            assert held(engine) == held(other) == 0
    loss = policy(input_ids=PROMPT, labels=PROMPT).loss
    with torch.no_grad():
        policy(input_ids=PROMPT)
    assert held(engine) == 0, "nothing is held while a graph waits for its backward"
    loss.backward()


@pytest.mark.parametrize(("setting", "forwards"), [("auto", 2), ("resident", 1)])
def test_another_model_holds_nothing_while_a_backward_is_to_come(engines: Any, setting: str, forwards: int) -> None:
    policy, _ = engines()
    reference, engine = engines(evaluation_weights=setting, gpu_memory_gib=1)

    def evaluate() -> int:
        with torch.no_grad():
            for _ in range(forwards):
                reference(input_ids=PROMPT)
        return held(engine)

    assert evaluate() == 6
    loss = policy(input_ids=PROMPT, labels=PROMPT).loss
    assert evaluate() == 0
    loss.backward()
    assert evaluate() == 6


def test_memory_that_is_not_there_is_no_error(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = engines(evaluation_weights="resident")
    whole, _ = engines(evaluation_weights="stream")
    prefetcher, hold = engine.runtime.prefetcher, engine.runtime.prefetcher.hold

    def hold_three(index: int) -> None:
        if index == 3:
            raise torch.OutOfMemoryError("no room")
        hold(index)

    monkeypatch.setattr(prefetcher, "hold", hold_three)
    monkeypatch.setattr(engine.device_plan.budget, "whole_bytes", lambda: GIB)
    text = generate(model)
    assert held(engine) == 3
    assert torch.equal(text, generate(whole))


def test_inference_mode_holds_weights_that_can_be_trained_afterwards(engines: Any) -> None:
    model, engine = engines(evaluation_weights="resident")
    with torch.inference_mode():
        model(input_ids=PROMPT)
    assert held(engine) == 6
    model(input_ids=PROMPT, labels=PROMPT).loss.backward()
    with torch.no_grad():
        model(input_ids=PROMPT)
    assert held(engine) == 6


def test_caches_are_measured_and_a_token_is_told_from_a_text() -> None:
    model = tiny_model(num_hidden_layers=3)
    with torch.no_grad():
        cache = model(input_ids=PROMPT, use_cache=True).past_key_values
    # Keys and values, 3 layers, 2 samples, 2 heads of 16 numbers, 5 tokens, 4 bytes each.
    assert cache_bytes({"past_key_values": cache}) == 2 * 3 * 2 * 2 * 16 * 5 * 4
    assert cache_bytes({"input_ids": PROMPT}) == 0
    assert is_next_token({"input_ids": PROMPT[:, :1], "past_key_values": cache})
    assert not is_next_token({"input_ids": PROMPT, "past_key_values": cache})
    assert not is_next_token({"input_ids": PROMPT[:, :1]})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize("setting", ["stream", "resident"])
def test_a_generation_that_transformers_compiles_leaves_the_engine_out(
    engines: Any, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As it does by itself on a GPU where the cache is static.
    model, engine = engines(evaluation_weights=setting)
    if not hasattr(transformers, "CompileConfig"):
        pytest.skip("this transformers compiles nothing by itself")
    compiled = transformers.CompileConfig(backend="eager", fullgraph=False)
    compiled._compile_all_devices = True
    traced: list[bool] = []
    acquire, make_room = engine.runtime.prefetcher.acquire, engine.device_plan.make_room

    def noting_acquire(*args: Any) -> Any:
        traced.append(torch.compiler.is_compiling())
        return acquire(*args)

    def noting_room(*args: Any) -> None:
        traced.append(torch.compiler.is_compiling())
        make_room(*args)

    monkeypatch.setattr(engine.runtime.prefetcher, "acquire", noting_acquire)
    monkeypatch.setattr(engine.device_plan, "make_room", noting_room)
    text = generate(model, 4, cache_implementation="static", compile_config=compiled)
    assert traced
    assert not any(traced)
    plain, _ = engines(evaluation_weights="stream")
    assert torch.equal(text, generate(plain, 4))


@pytest.mark.filterwarnings("ignore:Could not find a config file in")
def test_a_model_with_adapters_generates_from_held_layers() -> None:
    # PEFT's generate calls the model inside of it, whose forward is no forward of the prepared model.
    model = get_peft_model(tiny_model(num_hidden_layers=6), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    expected = generate(copy.deepcopy(model))
    engine = attach(model, evaluation_weights="auto", gpu_memory_gib=1)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    run = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    for _ in range(2):
        texts: list[torch.Tensor] = []
        assert fetched(engine, lambda found=texts: found.append(generate(model))) <= layer_bytes(engine) * 7 / 6
        assert held(engine) == 6
        assert torch.equal(texts[0], expected)
        run.step(PROMPT)
        run.step(token_batches(1)[0])
        assert held(engine) == 0
        expected = generate(copy.deepcopy(model))
    engine.close()


def test_an_encoder_decoder_generates_from_held_layers() -> None:
    def generated(**settings: Any) -> torch.Tensor:
        torch.manual_seed(0)
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4, "vocab_size": 128}
        model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0)).eval()
        engine = attach(model, training=False, **settings)
        counted = fetched(engine, lambda: found.append(model.generate(input_ids=PROMPT, max_new_tokens=6, min_new_tokens=6)))
        counts.append(counted / layer_bytes(engine))
        engine.close()
        return found[-1]

    found: list[torch.Tensor] = []
    counts: list[float] = []
    assert torch.equal(generated(evaluation_weights="resident"), generated(evaluation_weights="stream"))
    # The encoder ran before the decoder's first forward asked for room.
    assert counts[0] < 2 < counts[1]


def test_what_a_generation_needs_is_predicted_from_its_prompt_and_only_once(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = engines(evaluation_weights="auto", gpu_memory_gib=1)
    predicted: list[int] = []
    predict = evaluation_weights.evaluation_bytes

    def noting(model: nn.Module, runtime: Any, inputs: Any, device: torch.device) -> tuple[int, int]:
        predicted.append(inputs["input_ids"].shape[1])
        return predict(model, runtime, inputs, device)

    monkeypatch.setattr(evaluation_weights, "evaluation_bytes", noting)
    with torch.no_grad():
        model.eval()(input_ids=token_batches(1)[0])
    assert predicted == [], "a single forward of a reference model holds nothing"
    engine.device_plan.evaluation_weights.give_up()
    generate(model, 30)
    generate(model)
    assert predicted == [5]
    with torch.no_grad():
        model(input_ids=token_batches(1)[0])
    assert predicted == [5, 32]
    assert held(engine) == 6


@pytest.mark.parametrize(
    ("earlier", "later"),
    [((64, 16, {}), (1, 32, {})), ((1, 32, {}), (64, 16, {})), ((64, 20, {"logits_to_keep": 1}), (64, 16, {}))],
    ids=["before a longer one of fewer tokens", "after that", "after one that makes the last logits alone"],
)
def test_an_evaluation_is_predicted_to_need_what_the_largest_forward_so_far_needs(
    earlier: tuple[int, int, dict[str, Any]], later: tuple[int, int, dict[str, Any]]
) -> None:
    model = tiny_model(vocab_size=4096).eval()
    engine = attach(model, gpu_memory_gib=1)
    forwards = [{"input_ids": torch.ones(rows, length, dtype=torch.long), **more} for rows, length, more in (earlier, later)]
    alone = [evaluation_weights.evaluation_bytes(model, engine.runtime, inputs, engine.device)[0] for inputs in forwards]
    found = [engine.device_plan.evaluation_weights.needed_bytes(model, inputs) for inputs in forwards]
    assert found == [alone[0], max(alone)]
    engine.close()
