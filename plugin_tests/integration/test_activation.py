"""What switching on does to Accelerate, the Trainer and its arguments, and that nothing happens without it."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers.trainer
import yaml
from accelerate import Accelerator
from fresh_process import run_python
from torch import nn
from trainer_runs import assert_same_weights, examples, make_arguments, plugin, snapshot, tiny_llama
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from versions import OLD_CHECKPOINTING_NAMES

import megatrain_accelerate
from megatrain_accelerate import activation
from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import ConfigError, UnsupportedError


@pytest.fixture(autouse=True)
def _inactive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (activation.ENV_ACTIVE, activation.ENV_CONFIG, activation.ENV_DISABLE):
        monkeypatch.delenv(name, raising=False)
    megatrain_accelerate.disable()
    yield
    megatrain_accelerate.disable()


def arguments(**settings: Any) -> TrainingArguments:
    return TrainingArguments(**{"output_dir": "unused", "use_cpu": True, "report_to": "none", **settings})


def parse(*flags: str, cls: type = TrainingArguments) -> Any:
    (parsed,) = HfArgumentParser(cls).parse_args_into_dataclasses(["--output_dir", "unused", "--use_cpu", *flags])
    return parsed


class TestArguments:
    def test_flag_on_a_script_activates(self) -> None:
        parsed = parse("--megatrain")
        assert parsed.megatrain is True
        assert activation.active_config() == megatrain_accelerate.MegatrainConfig()

    def test_without_the_flag_nothing_is_active(self) -> None:
        assert parse().megatrain is False
        assert activation.active_config() is None

    def test_config_as_json(self) -> None:
        parsed = parse("--megatrain", "--megatrain_config", '{"host_threads": 3, "layer_classes": ["Block"]}')
        assert parsed.megatrain_config == {"host_threads": 3, "layer_classes": ["Block"]}
        config = activation.active_config()
        assert config is not None
        assert (config.host_threads, config.layer_classes) == (3, ("Block",))

    @pytest.mark.parametrize(
        "content", [{"host_threads": 4}, {"distributed_type": "MEGATRAIN", "megatrain_config": {"host_threads": 4}}]
    )
    def test_config_as_a_file(self, tmp_path: Path, content: dict[str, Any]) -> None:
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump(content))
        parsed = parse("--megatrain", "--megatrain_config", str(path))
        config = activation.active_config()
        assert config is not None
        assert config.host_threads == 4
        assert parsed.megatrain_config == str(path)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"host_threadz": 3}, "did you mean 'host_threads'"),
            ("no/such/file.yaml", "no/such/file.yaml"),
            ("{broken", "JSON object"),
        ],
    )
    def test_a_config_that_cannot_be_read_is_an_error(self, given: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            arguments(megatrain=True, megatrain_config=given)
        assert activation.active_config() is None

    def test_a_config_without_the_flag_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="megatrain is off"):
            arguments(megatrain_config={"host_threads": 3})

    def test_a_config_without_the_flag_is_an_error_also_beside_arguments_with_it(self) -> None:
        arguments(megatrain=True)
        with pytest.raises(ConfigError, match="megatrain is off"):
            arguments(megatrain_config={"host_threads": 3})

    def test_settings_of_the_script_are_laid_over_those_of_the_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(activation.ENV_ACTIVE, "1")
        monkeypatch.setenv(activation.ENV_CONFIG, '{"host_threads": 5, "micro_batch_size": 4}')
        arguments(megatrain=True, megatrain_config={"host_threads": 3})
        config = activation.active_config()
        assert config is not None
        assert (config.host_threads, config.micro_batch_size) == (3, 4)
        arguments(megatrain=True)
        config = activation.active_config()
        assert config is not None
        assert (config.host_threads, config.micro_batch_size) == (5, 4)

    @pytest.mark.parametrize("name", ["fp16", "fp16_full_eval"])
    def test_fp16_is_refused_with_the_reason(self, name: str) -> None:
        with pytest.raises(UnsupportedError, match=r"loss scaling.*bf16"):
            arguments(megatrain=True, **{name: True})
        assert activation.active_config() is None

    @pytest.mark.parametrize("settings", [{"deepspeed": "ds.json"}, {"fsdp": "full_shard"}])
    def test_other_ways_to_place_a_model_are_refused(self, settings: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match="remove one of the two"):
            arguments(megatrain=True, **settings)

    def test_one_process_uses_one_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        before = arguments(use_cpu=False)
        assert before.n_gpu == 4
        active = arguments(use_cpu=False, megatrain=True)
        assert (active.n_gpu, active._n_gpu, active.train_batch_size) == (1, 1, active.per_device_train_batch_size)
        assert before.n_gpu == 4, "these arguments didn't ask"
        megatrain_accelerate.enable()
        assert before.n_gpu == 1, "arguments made before a late enable()"

    def test_subclasses_take_the_fields(self) -> None:
        @dataclasses.dataclass
        class Mine(TrainingArguments):
            own: int = dataclasses.field(default=1, metadata={"help": "own"})

        class Plain(TrainingArguments):
            pass

        assert Mine(output_dir="unused", use_cpu=True, own=2, megatrain=True).own == 2
        assert activation.active_config() is not None
        assert Plain(output_dir="unused", use_cpu=True, megatrain=True).megatrain
        assert HfArgumentParser(Mine).format_help().count("--megatrain_config") == 2

    @pytest.mark.filterwarnings(OLD_CHECKPOINTING_NAMES)  # TRL sets it by its old name
    def test_trl_takes_the_flag_and_the_yaml(self, tmp_path: Path) -> None:
        trl = pytest.importorskip("trl", minversion="1.0")
        parser = trl.TrlParser(trl.SFTConfig)
        path = tmp_path / "sft.yaml"
        path.write_text(yaml.safe_dump({"use_cpu": True, "megatrain": True, "megatrain_config": {"host_threads": 6}}))
        options = ["--output_dir", "x", "--bf16", "False"]
        (parsed,) = parser.parse_args_and_config(["--config", str(path), *options])
        config = activation.active_config()
        assert config is not None
        assert config.host_threads == 6
        assert parsed.megatrain
        megatrain_accelerate.disable()
        trl.TrlParser(trl.SFTConfig).parse_args_and_config([*options, "--use_cpu", "--megatrain"])
        assert activation.active_config() is not None

    def test_unused_fields_stay_out_of_dictionaries(self) -> None:
        assert not [key for key in arguments().to_dict() if "megatrain" in key]
        assert arguments(megatrain=True).to_dict()["megatrain"] is True
        assert '"host_threads": 3' in arguments(megatrain=True, megatrain_config={"host_threads": 3}).to_json_string()
        assert "megatrain=True" in repr(arguments(megatrain=True))

    def test_replace_and_a_saved_file_keep_the_fields(self, tmp_path: Path) -> None:
        made = arguments(megatrain=True, megatrain_config={"host_threads": 3})
        assert dataclasses.replace(made, seed=7).megatrain_config == {"host_threads": 3}
        path = tmp_path / "training_args.bin"
        torch.save(made, path)
        assert torch.load(path, weights_only=False).megatrain_config == {"host_threads": 3}
        code = "import sys, torch; args = torch.load(sys.argv[1], weights_only=False); print(args.seed, args)"
        assert "42" in run_python(code, str(path), MEGATRAIN_DISABLE="1")

    def test_positional_arguments_mean_what_they_did(self) -> None:
        assert TrainingArguments("folder", use_cpu=True).output_dir == "folder"
        with pytest.raises(TypeError):
            TrainingArguments("folder", no_such_argument=1)


class TestEnable:
    def test_settings_may_come_in_every_form(self) -> None:
        assert megatrain_accelerate.enable(host_threads=3).host_threads == 3
        assert megatrain_accelerate.enable({"host_threads": 4}).host_threads == 4
        assert megatrain_accelerate.enable('{"host_threads": 5}').host_threads == 5
        config = megatrain_accelerate.MegatrainConfig(host_threads=6)
        assert megatrain_accelerate.enable(config) == config
        assert activation.active_config() == config
        assert megatrain_accelerate.enable().host_threads is None

    def test_two_kinds_of_settings_are_an_error(self) -> None:
        with pytest.raises(ConfigError, match="not both"):
            megatrain_accelerate.enable({"host_threads": 3}, host_threads=4)

    def test_the_off_switch_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(activation.ENV_DISABLE, "1")
        with pytest.raises(ConfigError, match="MEGATRAIN_DISABLE"):
            megatrain_accelerate.enable()

    def test_a_failure_of_the_autoload_is_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import _megatrain_autoload

        monkeypatch.setattr(_megatrain_autoload, "failure", ImportError("half an installation"))
        with pytest.raises(ImportError, match="half an installation"):
            megatrain_accelerate.enable()
        assert activation.active_config() is None

    def test_disable_ends_what_the_launcher_began(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(activation.ENV_ACTIVE, "1")
        assert activation.active_config() is not None
        megatrain_accelerate.disable()
        assert activation.active_config() is None


@pytest.fixture
def backend_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Calls that reach the backend, which passes them on."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    name = "megatrain_accelerate.integrations.accelerate_backend"
    backend = ModuleType(name)

    def pass_on(function: str) -> Any:
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((function, args[1:]))
            return original(*args, **kwargs)

        return call

    for function in ("prepare", "prepare_model", "prepare_optimizer", "clip_grad_norm", "free_memory"):
        setattr(backend, function, pass_on(function))
    backend.require_servable = lambda accelerator: calls.append(("init", ()))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, backend)
    return calls


class TestAccelerator:
    def use(self) -> tuple[nn.Module, Any]:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
        prepared(torch.ones(1, 2)).sum().backward()
        accelerator.clip_grad_norm_(prepared.parameters(), max_norm=1.0)
        accelerator.free_memory()
        return model, prepared_optimizer

    def test_calls_reach_the_backend(self, backend_calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        megatrain_accelerate.enable()
        model, _ = self.use()
        names = [name for name, _ in backend_calls]
        assert names == ["init", "prepare", "prepare_model", "prepare_optimizer", "clip_grad_norm", "free_memory"]
        assert backend_calls[1][1][0] is model
        assert backend_calls[2][1][0] is model

    def test_the_backend_is_not_asked_when_inactive(self, backend_calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        self.use()
        assert backend_calls == []

    def test_an_accelerator_made_before_enable_is_checked_when_it_prepares(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        model = tiny_llama()
        with plugin(active=False):
            accelerator = Accelerator()
            megatrain_accelerate.enable()
            with pytest.raises(ConfigError, match="found no CUDA device"):
                accelerator.prepare(model)
        with plugin(active=False):
            accelerator = Accelerator(cpu=True)
            megatrain_accelerate.enable()
            accelerator.prepare(model)
        assert engine_of(model) is not None

    def test_originals_stay_reachable(self) -> None:

        assert Accelerator.prepare_model.__wrapped__.__qualname__ == "Accelerator.prepare_model"
        assert Accelerator.prepare_model.__name__ == "prepare_model"


def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    return LlamaForCausalLM(config)


class TestTrainer:
    def test_the_callback_is_there_only_when_active(self) -> None:
        def callbacks() -> list[str]:
            trainer = Trainer(model=tiny_model(), args=arguments())
            return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]

        stock = callbacks()
        megatrain_accelerate.enable()
        active = callbacks()
        megatrain_accelerate.disable()
        assert callbacks() == stock
        assert "MegatrainCallback" not in stock
        assert active == [stock[0], "MegatrainCallback", *stock[1:]]

    def test_the_callback_comes_before_those_of_trackers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Tracker(TrainerCallback):
            pass

        monkeypatch.setattr(transformers.trainer, "get_reporting_integration_callbacks", lambda report_to: [Tracker])
        megatrain_accelerate.enable()
        trainer = Trainer(model=tiny_model(), args=arguments())
        names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
        assert names.index("MegatrainCallback") < names.index("Tracker")

    def test_arguments_switch_it_on_for_their_own_trainer_only(self, tmp_path: Path) -> None:
        def make(name: str, **settings: Any) -> Trainer:
            args = make_arguments(tmp_path / name, max_steps=2, save_strategy="steps", save_steps=2, **settings)
            return Trainer(model=tiny_llama(), args=args, train_dataset=examples(), eval_dataset=examples(4))

        def loss(trainer: Trainer) -> float:
            return trainer.evaluate()["eval_loss"]

        with plugin(active=False):
            before = make("before")
            before.train()
            stock, untrained = snapshot(before.model), loss(make("untrained"))
            three, four = (make(name, megatrain=True, megatrain_config={"host_threads": int(name)}) for name in ("3", "4"))
            plain = make("plain", megatrain=False)
            # In turns, and not in the order in which they were made.
            for trainer in (plain, three, four):
                assert loss(trainer) == pytest.approx(untrained, abs=1e-5)
            for trainer in (four, plain, three):
                trainer.train()
                assert_same_weights(snapshot(trainer.model), stock)
                assert loss(trainer) == pytest.approx(loss(before), abs=1e-5)
        for trainer, host_threads in ((three, 3), (four, 4)):
            engine = engine_of(trainer.model)
            assert engine is not None
            assert engine.config.host_threads == host_threads
        for trainer in (before, plain):
            assert engine_of(trainer.model) is None
            names = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}
            assert "MegatrainCallback" not in names
            assert not [key for entry in trainer.state.log_history for key in entry if key.startswith("megatrain/")]

    def test_what_only_streamed_trainings_refuse_is_left_alone_in_others(self) -> None:
        arguments(megatrain=True)
        # Arguments that set nothing for the whole process, as fsdp does in transformers 4.
        assert arguments(bf16_full_eval=True, optim="lomo").bf16_full_eval
        with pytest.raises(UnsupportedError, match="bf16_full_eval=True without bf16=True"):
            arguments(bf16_full_eval=True, megatrain=True)

    def test_arguments_that_are_loaded_from_a_file_switch_it_on_for_their_trainer(self, tmp_path: Path) -> None:
        path = tmp_path / "training_args.bin"
        torch.save(arguments(megatrain=True, megatrain_config={"host_threads": 3}), path)
        code = """
            import sys, torch
            from transformers import Trainer
            from megatrain_accelerate import activation
            args = torch.load(sys.argv[1], weights_only=False)
            trainer = Trainer(model=torch.nn.Linear(2, 2), args=args)
            print(activation.active_config(), [type(callback).__name__ for callback in trainer.callback_handler.callbacks])
        """
        printed = run_python(code, str(path), ACCELERATE_USE_CPU="true")
        assert "host_threads=3" in printed
        assert "MegatrainCallback" in printed

    @pytest.mark.parametrize("late", ["enabled", "changed"])
    def test_arguments_are_checked_when_their_trainer_is_made(self, late: str) -> None:
        made = arguments(megatrain=late == "changed", bf16_full_eval=late == "enabled")
        if late == "enabled":
            megatrain_accelerate.enable()
        else:
            made.bf16_full_eval = True
        with pytest.raises(UnsupportedError, match="bf16_full_eval=True without bf16=True"):
            Trainer(model=tiny_model(), args=made)

    def test_disable_holds_for_arguments_that_were_made_before(self) -> None:
        made = arguments(megatrain=True)
        megatrain_accelerate.disable()
        names = {type(callback).__name__ for callback in Trainer(model=tiny_model(), args=made).callback_handler.callbacks}
        assert "MegatrainCallback" not in names

    def test_steps_of_the_trainer_reach_ours_only_when_active(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatrain_accelerate.checkpoint import checkpoints
        from megatrain_accelerate.integrations import trainer as ours

        calls: list[tuple[str, tuple[Any, ...]]] = []
        for module, name in (
            (ours, "move_model_to_device"),
            (checkpoints, "save_checkpoint"),
            (checkpoints, "load_optimizer_and_scheduler"),
        ):
            monkeypatch.setattr(module, name, lambda original, self, *args, name=name: calls.append((name, args)))
        trainer = Trainer(model=tiny_model(), args=arguments())
        calls.clear()
        trainer._move_model_to_device(trainer.model, torch.device("cpu"))
        assert calls == []
        megatrain_accelerate.enable()
        trainer._move_model_to_device(trainer.model, torch.device("cpu"))
        trainer._save_checkpoint(trainer.model, None)
        trainer._load_optimizer_and_scheduler(None)
        assert [name for name, _ in calls] == ["move_model_to_device", "save_checkpoint", "load_optimizer_and_scheduler"]
        assert calls[1][1] == (trainer.model, None)

    def test_device_map_is_dropped_with_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        tiny_model().save_pretrained(tmp_path)
        with pytest.raises((ValueError, RuntimeError)):
            LlamaForCausalLM.from_pretrained(tmp_path, device_map="nowhere")
        megatrain_accelerate.enable()
        with caplog.at_level(logging.WARNING, logger="megatrain_accelerate"):
            model = LlamaForCausalLM.from_pretrained(tmp_path, device_map="nowhere")
            LlamaForCausalLM.from_pretrained(tmp_path)
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        ours = [record.getMessage() for record in caplog.records if record.name.startswith("megatrain")]
        assert len(ours) == 1
        assert "device_map='nowhere'" in ours[0]
