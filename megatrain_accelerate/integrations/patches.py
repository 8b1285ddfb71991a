"""Everything of Accelerate, Transformers, PEFT and TRL that is patched: what, why, where it was tested, when it can go.

Imported by ``import torch`` in every process, so it holds strings only: :mod:`.wrapping` imports a
replacement at its first call.
"""

from __future__ import annotations

from typing import NamedTuple

TESTED_VERSIONS = {
    "accelerate": "0.34.0 to 1.15.0",
    "transformers": "4.46.1 to 5.23.0",
    "peft": "0.13.2 to 0.21.2",
    "trl": "1.16.0",
}
"""By package, under which the tests of the patches passed: accelerate 0.34.0, 0.34.2, 1.2.1, 1.10.1, 1.12.0 and 1.15.0 with
transformers 4.46.1, 4.46.3, 4.51.3, 4.57.6, 5.0.0, 5.17.0 and 5.23.0; of peft the first and the last."""


class Patch(NamedTuple):
    """One changed thing."""

    target: str
    """``module:Class.name``, a method or a property."""
    replacement: str
    """``module:function(names)``: a function of integrations/ that is called instead, with the original
    first, and the parameters that the original must have. ``module:FIELDS``: fields of a dataclass."""
    reason: str
    """Why a hook, a subclass or a setting won't do."""
    until: str
    """When it can go."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]


_SHORTER_LOGS = (
    "every_process:on_log(self, state, logs)",
    "prints all that the trackers get, forty figures of the engine among it; it gets three of them",
)

_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "Accelerate's launcher lets an installed package add options and sections of the yaml": {
        "accelerate.commands.utils:CustomArgumentParser.add_argument": (
            "launcher:add_argument(self, args, kwargs)",
            "`--config` as an alias of `--config_file` and the flags `--megatrain`, `--megatrain_config`. On the parser's "
            "class, since `python -m accelerate.commands.launch` runs the launcher's module as __main__, where no hook is",
        ),
        "accelerate.commands.utils:CustomArgumentParser.parse_args": (
            "launcher:parse_args()",
            "checks the settings before anything is started and hands them to the training processes by environment",
        ),
        "accelerate.commands.config.config_args:ClusterConfig.__init__": (
            "launcher:FIELDS",
            "a field for the section `megatrain_config`, which is an unknown key otherwise",
        ),
        "accelerate.commands.config.config_args:BaseConfig.process_config": (
            "launcher:process_config(config_dict)",
            "accepts `distributed_type: MEGATRAIN` and turns it into NO",
        ),
        "accelerate.commands.config.config_args:BaseConfig.to_dict": (
            "launcher:to_dict()",
            "`accelerate config update` would delete the section and the type",
        ),
    },
    "Accelerate lets an installed package add its own way of distributing a model": {
        "accelerate.accelerator:Accelerator.__init__": (
            "every_process:init_accelerator(self)",
            "checks the device, precision and number of processes as soon as they are known",
        ),
        "accelerate.accelerator:Accelerator.prepare": (
            "accelerate_backend:prepare(self, args)",
            "a small module that is prepared together with a model that streams is placed as usual, whichever comes first",
        ),
        "accelerate.accelerator:Accelerator.prepare_model": (
            "accelerate_backend:prepare_model(self, model, device_placement, evaluation_mode)",
            "attaches the engine instead of moving the model to the GPU",
        ),
        "accelerate.accelerator:Accelerator.prepare_optimizer": (
            "accelerate_backend:prepare_optimizer(self, optimizer, device_placement)",
            "the optimizer steps on the host store; AcceleratedOptimizer would copy its state to the GPU",
        ),
        "accelerate.accelerator:Accelerator.clip_grad_norm_": (
            "accelerate_backend:clip_grad_norm(self, parameters, max_norm, norm_type)",
            "the norm is known already; the clip factor is folded into the fused step",
        ),
        "accelerate.accelerator:Accelerator.free_memory": (
            "accelerate_backend:free_memory(self, objects)",
            "the engines hold host memory and unapplied steps",
        ),
        "transformers.training_args:TrainingArguments.place_model_on_device": (
            "trainer:place_model_on_device()",
            "the Trainer would move the whole model to the GPU",
        ),
        "transformers.trainer:Trainer.create_accelerator_and_postprocess": (
            "every_process:create_accelerator(self)",
            "the Trainer's own arguments decide whether what its Accelerator prepares is streamed",
        ),
        "transformers.trainer:Trainer._move_model_to_device": (
            "trainer:move_model_to_device(self, model, device)",
            "`*_full_eval` and `model_init` call it whatever place_model_on_device says",
        ),
    },
    "Transformers lets an installed package add training arguments": {
        "transformers.training_args:TrainingArguments.__init__": (
            "every_process:FIELDS",
            "the fields `megatrain` and `megatrain_config`, for every script with TrainingArguments or a subclass",
        ),
        "transformers.training_args:TrainingArguments.__post_init__": (
            "every_process:post_init()",
            "switches the plugin on before the device is set up; refuses what can't be honoured",
        ),
        "transformers.training_args:TrainingArguments.to_dict": (
            "every_process:to_dict()",
            "fields that aren't used stay out of logs, model cards and JSON files that others read back",
        ),
    },
    "the Trainer stops using DataParallel": {
        "transformers.training_args:TrainingArguments.n_gpu": (
            "trainer:n_gpu()",
            "one process uses one GPU: with several visible the Trainer would wrap the model in DataParallel",
        ),
    },
    "Transformers lets an installed package add callbacks, and Accelerate its own way of distributing a model": {
        "transformers.trainer:Trainer.__init__": (
            "every_process:init_trainer(self, model, args)",
            "code that runs the model before training (TRL's log-probabilities of the reference) expects it on the GPU: it is "
            "prepared when that happens. Our callback comes before WandbCallback, so that what it adds to the logs reaches "
            "the trackers",
        ),
    },
    "the Trainer itself writes checkpoints so that a kill leaves none that is broken": {
        "transformers.trainer:Trainer._save_checkpoint": (
            "checkpoints:save_checkpoint(self, model, trial)",
            "a checkpoint is written aside and renamed when complete",
        ),
    },
    "the Trainer loads checkpoints into models on the meta device": {
        "transformers.trainer:Trainer._load_from_checkpoint": (
            "trainer:load_from_checkpoint(self, resume_from_checkpoint)",
            "a model that was built without weights is prepared before a checkpoint is loaded into it: load_state_dict leaves "
            "weights on the meta device as they are, with no more than a warning",
        ),
    },
    "the Trainer loads optimizer states with mmap=True and on the host": {
        "transformers.trainer:Trainer._load_optimizer_and_scheduler": (
            "checkpoints:load_optimizer_and_scheduler(self, checkpoint)",
            "the optimizer's state is read through a file mapping, not whole into memory and not to the GPU",
        ),
    },
    "Transformers tells callbacks of a step's micro-batches": {
        "transformers.trainer:Trainer.get_batch_samples": (
            "joined_batches:get_batch_samples(self, epoch_iterator, num_batches)",
            "the one place where all micro-batches of an optimizer step are together; nothing is changed in them",
        ),
    },
    "the Trainer lets a plugin run a step's micro-batches together": {
        "transformers.trainer:Trainer.training_step": (
            "joined_batches:training_step(self, model, inputs, num_items_in_batch)",
            "runs the micro-batches of a step as one batch, so that a layer is fetched once for all of them",
        ),
    },
    "Transformers lets a callback add to the logs what isn't printed": {
        "transformers.trainer_callback:ProgressCallback.on_log": _SHORTER_LOGS,
        "transformers.trainer_callback:PrinterCallback.on_log": _SHORTER_LOGS,
        "trl.trainer.callbacks:RichProgressCallback.on_log": _SHORTER_LOGS,
    },
    "the Trainer smooths labels by torch.nn.functional.cross_entropy": {
        "transformers.trainer_pt_utils:LabelSmoother.__call__": (
            "trainer:label_smoothed_loss(self, model_output, labels, shift_labels)",
            "computes the smoothed loss from the log-probabilities of all tokens; `cross_entropy` gives the same by tiles",
        ),
    },
    "TRL leaves device_map alone": {
        "transformers.modeling_utils:PreTrainedModel.from_pretrained": (
            "trainer:from_pretrained(cls, kwargs)",
            "drops `device_map` with a warning: TRL sets it to auto, which fills the GPU",
        ),
    },
    "torch tells of reads and writes through parameter.data, or the caller writes to the parameter itself": {
        "peft.tuners.tuners_utils:BaseTuner.merge_and_unload": (
            "shared_parts:leave_then(self)",
            "takes the model apart by parameter.data: the engine gives the model back before, with all steps applied",
        ),
        "peft.tuners.tuners_utils:BaseTuner.unload": ("shared_parts:leave_then(self)", "as merge_and_unload"),
        "peft.tuners.tuners_utils:BaseTuner.merge_adapter": (
            "shared_parts:write_through(self)",
            "reads and writes parameter.data: steps must be applied before, and what was written be streamed after",
        ),
        "peft.tuners.tuners_utils:BaseTuner.unmerge_adapter": ("shared_parts:write_through(self)", "as merge_adapter"),
        "peft.tuners.tuners_utils:BaseTuner.set_adapter": (
            "shared_parts:unmerge_first(self)",
            "unmerges what is merged, by parameter.data",
        ),
        "trl.trainer.callbacks:SyncRefModelCallback.sync_target_model": (
            "shared_parts:sync_target_model(model, target_model, alpha)",
            "reads and writes parameter.data: steps must be applied before, and what was written be streamed after",
        ),
    },
    "PEFT unmerges before": {
        "peft.tuners.tuners_utils:BaseTuner.disable_adapter_layers": (
            "shared_parts:unmerge_first(self)",
            "unmerges what is merged when a layer runs next, when its weights are a slot's",
        ),
    },
}
"""By when they can go: targets, what replaces them, and the reason."""

PATCHES = tuple(
    Patch(target, *replacement, until) for until, targets in _TABLE.items() for target, replacement in targets.items()
)
