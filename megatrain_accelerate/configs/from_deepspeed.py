"""Converts a configuration of DeepSpeed, or of Accelerate for it (``megatrain config --from``). Weights and states live on the
host in any case, and a plan chooses the rest, so the user is told for each key why nothing is needed, or what to do."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from megatrain_accelerate.errors import ConfigError


class Kind(enum.Enum):
    """What a remark asks of the user. Remarks are shown in this order, below these titles."""

    DO = "To do, in the script or this file"
    AUTO = "Decided by the script's own arguments, as before"
    NOTHING = "Nothing to do"
    WITHOUT = "Without a counterpart here"
    UNKNOWN = "Not known, so nothing was made of it"


class Remark(NamedTuple):
    """What becomes of a key. The text may contain ``{value}``."""

    kind: Kind
    text: str


@dataclasses.dataclass
class Conversion:
    """The settings of the yaml that is written, and the remarks for the user."""

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of the accelerate yaml besides those that every such file has."""
    remarks: dict[Remark, list[str]] = dataclasses.field(default_factory=dict)
    """Each remark with the keys that it is about."""

    def note(self, remark: Remark | None, key: str) -> None:
        """Adds a remark, if there is one. Keys with the same remark are shown together."""
        if remark is not None:
            self.remarks.setdefault(remark, []).append(key)

    def lines(self) -> Iterator[str]:
        """Yields the remarks as lines of text, by kind."""
        for kind in Kind:
            of_kind = {remark.text: keys for remark, keys in self.remarks.items() if remark.kind is kind}
            if of_kind:
                yield f"{kind.value}:"
            for text, keys in of_kind.items():
                about = ", ".join(keys) + (f": {text}" if text else "")
                whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
                yield from textwrap.wrap(about, 120, initial_indent="- ", subsequent_indent="  ", **whole)

    def yaml(self, source: str) -> str:
        """Returns the text of the file: settings, then the remarks as comments."""
        settings = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MEGATRAIN", "num_processes": 1}
        settings |= {"num_machines": 1, **self.settings}
        settings = dict(sorted(settings.items(), key=lambda item: item[0] == "megatrain_config"))  # megatrain_config last
        head = f"# Made of {source}. Start a training with: accelerate launch --config THIS_FILE train.py\n"
        remarks = "".join(f"# {line}\n" for line in self.lines())
        return f"{head}{yaml.safe_dump(settings, sort_keys=False)}\n{remarks}"


Handler = Callable[[Any, Conversion], "Remark | None"]
"""Enters settings for a value, and returns its remark, or None if there is nothing to say."""

_do = functools.partial(Remark, Kind.DO)
_nothing = functools.partial(Remark, Kind.NOTHING)
_without = functools.partial(Remark, Kind.WITHOUT)


def _is_off(value: Any) -> bool:
    """Whether a key asks for nothing: false, 0, none, an empty or a disabled section."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return not value or str(value).lower() in ("none", "false", "no")


def _is(*names: str) -> Callable[[Any], bool]:
    return lambda value: str(value).lower() in names


def _where(
    test: Callable[[Any], bool], then: Remark | None, otherwise: Remark | Handler | None = None, **settings: Any
) -> Handler:
    """Returns a handler that gives the remark ``then`` for a value that passes the test, and ``otherwise`` for another. One
    that passes also enters these settings. A setting that is a type stands for the value converted to it."""

    def handle(value: Any, conversion: Conversion) -> Remark | None:
        if test(value):
            for name, setting in settings.items():
                conversion.settings[name] = setting(value) if isinstance(setting, type) else setting
            return then
        return otherwise(value, conversion) if callable(otherwise) else otherwise

    return handle


def _argument(name: str) -> Remark:
    return _do(f"{name}={{value}} in the script")


_FP16 = _do(
    "fp16 is refused here, since its gradients need loss scaling. mixed_precision: bf16 is written instead; where the "
    "script says fp16 (fp16=True, --fp16), it must say bf16"
)
_CLIPPING = _where(
    _is_off,
    _do("max_grad_norm=0 in the script: DeepSpeed didn't clip, and the Trainer's default is 1.0"),
    _do("max_grad_norm={value} in the script (the Trainer's default is 1.0), or accelerator.clip_grad_norm_ in a loop"),
)
_WARMUP = _where(
    _is("linear"),
    _nothing("the Trainer's warm-up is linear"),
    _without(
        "DeepSpeed's learning rate rises by a logarithm unless warmup_type is linear; the Trainer's is linear, so the first "
        "warmup_steps have lower rates"
    ),
)
_PLANNED = _nothing(
    "weights, gradients and states live in host memory, and on the GPU as far as it has room; which of them, and when they "
    "are copied or exchanged, the plan finds by the model, the batch and the machine"
)
_SCHEDULES = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}


def _mixed_precision(value: Any, conversion: Conversion) -> Remark | None:
    if value is None:
        return None
    kept = value or "no"  # yaml reads a bare no as false
    if kept in ("bf16", "no"):
        conversion.settings.setdefault("mixed_precision", kept)
        return None
    conversion.settings["mixed_precision"] = "bf16"
    return _FP16 if kept == "fp16" else _without("{value} isn't supported; mixed_precision: bf16 is written instead")


def _optimizer(value: Any, conversion: Conversion) -> Remark:
    if _is("adam", "adamw", "deepspeedcpuadam", "fusedadam")(value):
        what = "{value} is the Trainer's default (AdamW), fused on the host here"
    elif _is("onebitadam", "zerooneadam", "onebitlamb")(value):
        what = "{value} compresses traffic between GPUs: with one take the Trainer's default (AdamW)"
    else:
        what = (
            "name it in the script: the Trainer's optim, or an optimizer object. Adam and AdamW are fast, {value} would run "
            "its own step on the host"
        )
    return _do(f"{what}; a bare Accelerator loop makes its optimizer itself, no accelerate.utils.DummyOptim")


def _scheduler(value: Any, conversion: Conversion) -> Remark:
    named = _SCHEDULES.get(str(value).lower())
    what = f"{{value}} is the Trainer's lr_scheduler_type={named}"
    if named is None:
        what = "the Trainer has no {value}: give it a torch scheduler in optimizers="
    return _do(f"{what}; a bare Accelerator loop makes it itself, no accelerate.utils.DummyScheduler")


_ROWS: dict[str, Remark | Handler] = {
    # Batch and steps
    "train_batch_size": _do(
        "{value} sequences a step, over all GPUs: per_device_train_batch_size x gradient_accumulation_steps must be it here"
    ),
    "train_micro_batch_size_per_gpu": _argument("per_device_train_batch_size"),
    "gradient_accumulation_steps deepspeed_config.gradient_accumulation_steps": _where(
        lambda value: value == 1 or _is_off(value), None, _argument("gradient_accumulation_steps")
    ),
    "gradient_clipping optimizer.params.max_grad_norm deepspeed_config.gradient_clipping": _CLIPPING,
    "managed_gradient_accumulation": _nothing("the Trainer or the Accelerator accumulates"),
    "dataloader_drop_last": _argument("dataloader_drop_last"),
    # Precision
    "bf16.enabled bfloat16.enabled": _where(
        _is("true"),
        _nothing("mixed_precision: bf16 in this file; masters and moments are fp32 in any case"),
        mixed_precision="bf16",
    ),
    "bf16 bfloat16": _nothing("a step's arithmetic on masters and moments is fp32"),
    "bf16.bf16_master_weights_and_grads fp16.fp16_master_weights_and_grads": _without("masters are fp32"),
    "bf16.bf16_optimizer_states": _do("moments_dtype: bf16 below megatrain_config does so"),
    "fp16.enabled": _where(_is("true"), _FP16, mixed_precision="bf16"),
    "fp16": _nothing("bf16 needs no loss scaling"),
    "amp fp8_config": _without("NVIDIA's apex and fp8 aren't used; take bf16"),
    "torch_autocast": _do("mixed_precision: bf16 in this file is torch's autocast"),
    "data_types.grad_accum_dtype": _where(
        _is("bf16", "bfloat16"),
        _nothing("accumulation_dtype: bf16 in this file"),
        _where(_is_off, None, _nothing("accumulation_dtype is fp32 by default")),
        megatrain_config={"accumulation_dtype": "bf16"},
    ),
    "mixed_precision": _mixed_precision,
    # Optimizer and schedule
    "optimizer.type": _optimizer,
    "optimizer.params.lr scheduler.params.warmup_max_lr": _argument("learning_rate"),
    "optimizer.params.betas": _do("adam_beta1 and adam_beta2 of the script: {value}"),
    "optimizer.params.eps": _argument("adam_epsilon"),
    "optimizer.params.weight_decay": _argument("weight_decay"),
    "optimizer.params": _do("give it to the script's optimizer: {value}"),
    "optimizer.params.torch_adam optimizer.legacy_fusion zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": _nothing(
        "Adam and AdamW have a fused kernel on the host; any other torch optimizer runs too"
    ),
    "optimizer.params.adam_w_mode optimizer.params.adamw_mode": _where(
        _is("false"),
        _do(
            "DeepSpeed's Adam adds weight decay to the gradient (L2) then: torch.optim.Adam in the Trainer's optimizers= "
            "does so, AdamW is another training"
        ),
        _nothing("AdamW decouples weight decay from the gradient"),
    ),
    "optimizer.params.bias_correction": _where(
        _is("false"), *(kind("AdamW corrects the moments' bias") for kind in (_without, _nothing))
    ),
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_num_steps": _argument("warmup_steps"),
    "scheduler.params.total_num_steps scheduler.params.last_batch_iteration": _nothing(
        "the Trainer knows how many steps there are, and begins where its checkpoint ended"
    ),
    "scheduler.params.warmup_type": _WARMUP,
    "scheduler.params.warmup_min_lr": _where(
        _is_off, *(kind("the Trainer's warm-up begins with 0") for kind in (_nothing, _without))
    ),
    "scheduler.params.cos_min_ratio": _do(
        "lr_scheduler_type=cosine_with_min_lr and lr_scheduler_kwargs={{'min_lr_rate': {value}}} in the script"
    ),
    "scheduler.params": _do("give it to a scheduler of the script's own: {value}"),
    # ZeRO: where weights and states are stored
    "zero deepspeed_config communication_data_type disable_allgather gradient_allreduce_op gradient_predivide_factor "
    "optimizer.params.freeze_step prescale_gradients seq_parallel_comm_data_type seq_parallel_communication_data_type "
    "sparse_gradients": _PLANNED,
    "zero.offload_optimizer.device zero.offload_param.device deepspeed_config.offload_optimizer_device "
    "deepspeed_config.offload_param_device": _where(
        _is("nvme"),
        _without(
            "there is no third tier: what doesn't fit host memory doesn't train. `megatrain estimate MODEL` says what is "
            "needed; moments_dtype: int8 and host_gradients: passing bring 14 bytes a parameter down to 6"
        ),
        _PLANNED,
    ),
    "aio zero.offload_optimizer.nvme_path zero.offload_param.nvme_path deepspeed_config.offload_optimizer_nvme_path "
    "deepspeed_config.offload_param_nvme_path": _without("nothing goes to NVMe"),
    "zero.zenflow": _without("every gradient is applied in the step that it belongs to"),
    "zero.stage3_gather_16bit_weights_on_model_save zero.stage3_gather_fp16_weights_on_model_save "
    "zero.gather_16bit_weights_on_model_save checkpoint deepspeed_config.zero3_save_16bit_model": _nothing(
        "checkpoints have the whole weights, under the stock names, in any case"
    ),
    "zero.zero_quantized_gradients zero.zero_quantized_weights zero.zero_quantized_nontrainable_weights "
    "zero.zeropp_loco_param compression_training quantize_training weight_quantization": _without(
        "weights and gradients aren't quantised or compressed"
    ),
    # What is computed, and how
    "activation_checkpointing autotuning compile dynamo_config elasticity graph_harvesting hybrid_engine": _nothing(
        "the plan keeps, recomputes or offloads activations, compiles layers where that pays (compile_layers), and holds "
        "weights on the GPU for generation (evaluation_weights)"
    ),
    "curriculum_learning data_efficiency eigenvalue progressive_layer_drop sparse_attention": _without(
        "it changes the data or the model, which are the script's"
    ),
    "expert_parallel pipeline sequence_parallel_size tensor_parallel use_data_before_expert_parallelism "
    "use_data_before_expert_parallel_ fsdp_config megatron_lm_config parallelism_config": _without(
        "the model isn't split over GPUs: each computes all of it"
    ),
    # Logs and trackers
    "comms_logger dump_state flops_profiler log_level memory_breakdown steps_per_print timers wall_clock_breakdown "
    "zero.enable_sanity_checks zero.log_trace_cache_warnings": _nothing(
        "the Trainer's logs have speed, memory and waits; `megatrain trace` draws a step"
    ),
    "comet csv_monitor monitor_config tensorboard wandb": _do("trackers are the script's: report_to of the Trainer"),
    # Keys of Accelerate's yaml
    "use_cpu": _where(_is("true"), None, use_cpu=True),
    "gpu_ids": _where(lambda value: all(number.strip().isdigit() for number in str(value).split(",")), None, gpu_ids=str),
    "num_processes": _where(lambda value: str(value).isdigit(), None, num_processes=int),
    "num_machines": _where(
        _is("1"),
        None,
        _do(
            "one machine is used, not {value}, and num_processes counts the GPUs of all: set it to this one's. For the "
            "same batch multiply the script's per_device_train_batch_size by {value}"
        ),
    ),
    # No remark: this file has its own entry, the named file is read, or the key is for machines of other kinds.
    "commands command_file compute_environment debug distributed_type downcast_bf16 enable_cpu_affinity ipex_config "
    "machine_rank main_process_ip main_process_port main_training_function mpirun_config rdzv_backend same_network tpu_env "
    "tpu_name tpu_use_cluster tpu_use_sudo tpu_zone deepspeed_config.deepspeed_config_file "
    "deepspeed_config.deepspeed_exclusion_filter deepspeed_config.deepspeed_hostfile "
    "deepspeed_config.deepspeed_inclusion_filter deepspeed_config.deepspeed_multinode_launcher": _where(_is_off, None),
}
KEYS = {re.sub(r"^zero\b", "zero_optimization", key): entry for keys, entry in _ROWS.items() for key in keys.split()}
"""What becomes of each key, by its name with its sections. A section's entry counts for those of its keys that have none."""
_SECTIONS = {key[: dot.start()] for key in KEYS for dot in re.finditer(r"\.", key)}


def convert(path: Path) -> Conversion:
    """Reads a configuration of DeepSpeed (JSON), or one of Accelerate (yaml) and the DeepSpeed file that it names. Raises
    ``ConfigError`` if a file is missing, or is neither."""
    conversion = Conversion()
    refused = "leave it out, or the run is refused: --deepspeed, deepspeed=..., DeepSpeedPlugin, the launcher's flags"
    conversion.note(_do(refused), "deepspeed")
    if named := _section(_take_over(path, conversion), "deepspeed_config").get("deepspeed_config_file"):
        file = Path(str(named))
        # Accelerate resolves the name from the folder in which it is started.
        _take_over(file if file.exists() else path.parent / file, conversion)
    return conversion


def _take_over(path: Path, conversion: Conversion) -> Mapping[str, Any]:
    """Notes what a file says. Also notes what a DeepSpeed file leaves out if the Trainer has another default for it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    try:
        given = json.loads(text)
    except json.JSONDecodeError as not_json:
        try:
            given = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is neither JSON ({not_json}) nor yaml") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path} has no keys: a configuration of DeepSpeed's or Accelerate's was expected")
    _walk(given, "", conversion)
    if "zero_optimization" in given:
        optimizer, scheduler = (_section(given, name) for name in ("optimizer", "scheduler"))
        if "gradient_clipping" not in given and "max_grad_norm" not in _section(optimizer, "params"):
            conversion.note(_CLIPPING(None, conversion), "gradient_clipping")
        if "warmup_type" not in _section(scheduler, "params") and str(scheduler.get("type")).lower() in _SCHEDULES:
            conversion.note(_WARMUP(None, conversion), "scheduler.params.warmup_type")
    return given


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = given.get(name)
    return section if isinstance(section, Mapping) else {}


def _walk(section: Mapping[str, Any], prefix: str, conversion: Conversion) -> None:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if (isinstance(value, Mapping) and value.get("enabled") is False) or (value is None and key in _SECTIONS):
            continue
        if isinstance(value, Mapping) and key in _SECTIONS:
            _walk(value, f"{key}.", conversion)
        else:
            conversion.note(_remark(key, value, conversion), key)


def _remark(key: str, value: Any, conversion: Conversion) -> Remark | None:
    above = [*itertools.accumulate(key.split("."), "{}.{}".format)]
    entry = next((KEYS[section] for section in reversed(above) if section in KEYS), None)
    if entry is None:
        near = difflib.get_close_matches(key, KEYS, 1, 0.9)
        return Remark(Kind.UNKNOWN, f"did you mean {near[0]}?" if near else "")
    if value == "auto" and not (isinstance(entry, Remark) and entry.kind is not Kind.DO):
        said_fp16 = _do("where the script says fp16 (fp16=True, --fp16), it must say bf16")
        return said_fp16 if key == "fp16.enabled" else Remark(Kind.AUTO, "")
    if not isinstance(entry, Remark):
        remark = entry(value, conversion)
    else:
        remark = None if entry.kind is not Kind.NOTHING and _is_off(value) else entry
    return remark and remark._replace(text=remark.text.format(value=value))
