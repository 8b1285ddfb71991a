"""All that is patched in Accelerate, Transformers, PEFT and TRL: what, why, where it was tested, when it can go. Imported in
every process that imports torch, hence only strings: :mod:`.wrapping` imports a replacement at its first call."""

from __future__ import annotations

from typing import NamedTuple

TESTED_VERSIONS = {
    "accelerate": "0.34.0 to 1.15.0",
    "transformers": "4.46.1 to 5.23.0",
    "peft": "0.13.2 to 0.21.2",
    "trl": "1.16.0",
}
"""The versions with which the patches' tests passed: accelerate 0.34.0, 0.34.2, 1.2.1, 1.10.1, 1.12.0 and 1.15.0 with
transformers 4.46.1, 4.46.3, 4.51.3, 4.57.6, 5.0.0, 5.17.0 and 5.23.0; of peft the first and the last."""


class Patch(NamedTuple):
    target: str
    """``module:Class.name`` of a method or a property, or ``module:name`` of a function."""
    replacement: str
    """``module:function(names)``: a function of integrations/, or of ``folder.module``, that is called instead, with the
    original as first argument, and names of parameters that the original must have. For an ``__init__`` it is called
    afterwards, with the new object. ``module:FIELDS``: fields to add to a dataclass."""
    since: str = "0"
    """The package's version that brought the target."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]


_ACCELERATOR = "accelerate.accelerator:Accelerator"
_TRAINER = "transformers.trainer:Trainer"
_ARGUMENTS = "transformers.training_args:TrainingArguments"
_TUNER = "peft.tuners.tuners_utils:BaseTuner"

PATCHES = (
    # --- Until Accelerate's launcher lets an installed package add options and sections of the yaml.
    # `--config` as an alias of `--config_file` and the flags `--megatrain`, `--megatrain_config`. On the parser's class, since
    # `python -m accelerate.commands.launch` runs the launcher's module as __main__, where no hook is.
    Patch("accelerate.commands.utils:CustomArgumentParser.add_argument", "launcher:add_argument(self, args, kwargs)"),
    # Checks the settings before anything is started and hands them to the training processes by environment.
    Patch("accelerate.commands.utils:CustomArgumentParser.parse_args", "launcher:parse_args()"),
    # A field for the section `megatrain_config`, which is an unknown key otherwise.
    Patch("accelerate.commands.config.config_args:ClusterConfig.__init__", "launcher:FIELDS"),
    # Accepts `distributed_type: MEGATRAIN` and turns it into NO.
    Patch("accelerate.commands.config.config_args:BaseConfig.process_config", "launcher:process_config(config_dict)"),
    # `accelerate config update` would delete the section and the type.
    Patch("accelerate.commands.config.config_args:BaseConfig.to_dict", "launcher:to_dict()"),
    # --- Until Accelerate lets an installed package add its own way of distributing a model.
    # Checks the device, the precision and that nothing is compiled as a whole as soon as they are known.
    Patch(f"{_ACCELERATOR}.__init__", "accelerate_backend:require_servable(self)"),
    # A small module that is prepared together with a model that streams is placed as usual, whichever comes first.
    Patch(f"{_ACCELERATOR}.prepare", "accelerate_backend:prepare(self, args)"),
    # Attaches the engine instead of moving the model to the GPU.
    Patch(f"{_ACCELERATOR}.prepare_model", "accelerate_backend:prepare_model(self, model, device_placement, evaluation_mode)"),
    # The optimizer steps on the host store; AcceleratedOptimizer would copy its state to the GPU.
    Patch(f"{_ACCELERATOR}.prepare_optimizer", "accelerate_backend:prepare_optimizer(self, optimizer, device_placement)"),
    # The norm is known already; the clip factor is folded into the fused step.
    Patch(f"{_ACCELERATOR}.clip_grad_norm_", "accelerate_backend:clip_grad_norm(self, parameters, max_norm, norm_type)"),
    # With several GPUs weights and optimizer states would be read into each of them.
    Patch(f"{_ACCELERATOR}.load_state", "accelerate_backend:load_state(self, input_dir)"),
    # Steps of the models that it forgets may not be applied yet.
    Patch(f"{_ACCELERATOR}.free_memory", "accelerate_backend:free_memory(self, objects)"),
    # The Trainer's own arguments decide whether what its Accelerator prepares is streamed.
    Patch(f"{_TRAINER}.create_accelerator_and_postprocess", "wrapping:create_accelerator(self)"),
    # The Trainer would move the whole model to the GPU, in several places.
    Patch(f"{_TRAINER}._move_model_to_device", "trainer:move_model_to_device(self, model, device)"),
    # --- Until Transformers lets an installed package add training arguments.
    # The fields `megatrain` and `megatrain_config`, for every script with TrainingArguments or a subclass.
    Patch(f"{_ARGUMENTS}.__init__", "training_arguments:FIELDS"),
    # Switches the plugin on before the device is set up; refuses what can't be honoured.
    Patch(f"{_ARGUMENTS}.__post_init__", "training_arguments:post_init()"),
    # Fields that aren't used stay out of logs, model cards and JSON files that others read back.
    Patch(f"{_ARGUMENTS}.to_dict", "training_arguments:to_dict()"),
    # --- Until the Trainer stops using DataParallel.
    # One process uses one GPU: with several visible the Trainer would wrap the model in DataParallel.
    Patch(f"{_ARGUMENTS}.n_gpu", "trainer:n_gpu()"),
    # --- Until Transformers lets an installed package add callbacks, and Accelerate its own way of distributing a model.
    # Code that runs the model before training (TRL's log-probabilities of the reference) expects it on the GPU: it is prepared
    # when that happens. Our callback comes before WandbCallback, so that what it adds to the logs reaches the trackers.
    Patch(f"{_TRAINER}.__init__", "trainer:follow_trainer(self, model, args)"),
    # --- Until the Trainer itself writes checkpoints so that a kill leaves none that is broken.
    # A checkpoint is written aside and renamed when complete.
    Patch(f"{_TRAINER}._save_checkpoint", "checkpoint.checkpoints:save_checkpoint(self, model, trial)"),
    # --- Until the Trainer loads checkpoints into models on the meta device.
    # A model that was built without weights is prepared before a checkpoint is loaded into it: load_state_dict leaves weights
    # on the meta device as they are, with no more than a warning.
    Patch(f"{_TRAINER}._load_from_checkpoint", "trainer:load_from_checkpoint(self, resume_from_checkpoint)"),
    # --- Until the Trainer loads optimizer states with mmap=True and on the host.
    # The optimizer's state is read through a file mapping, not whole into memory and not to the GPU.
    Patch(
        f"{_TRAINER}._load_optimizer_and_scheduler", "checkpoint.checkpoints:load_optimizer_and_scheduler(self, checkpoint)"
    ),
    # --- Until Transformers tells callbacks of a step's micro-batches.
    # The one place where all micro-batches of an optimizer step are together. They aren't changed.
    Patch(f"{_TRAINER}.get_batch_samples", "joined_batches:get_batch_samples(self, epoch_iterator, num_batches)"),
    # --- Until the Trainer lets a plugin run a step's micro-batches together.
    # Runs the micro-batches of a step as one batch, so that a layer is fetched once for all of them.
    Patch(f"{_TRAINER}.training_step", "joined_batches:training_step(self, model, inputs, num_items_in_batch)"),
    # --- Until Transformers lets a callback add to the logs what isn't printed.
    # These callbacks print all that trackers get, also forty figures of the engine. They are given three of those.
    Patch("transformers.trainer_callback:ProgressCallback.on_log", "telemetry:on_log(self, state, logs)"),
    Patch("transformers.trainer_callback:PrinterCallback.on_log", "telemetry:on_log(self, state, logs)"),
    Patch("trl.trainer.callbacks:RichProgressCallback.on_log", "telemetry:on_log(self, state, logs)"),
    # --- Until the Trainer smooths labels by torch.nn.functional.cross_entropy.
    # Computes the smoothed loss from the log-probabilities of all tokens; `cross_entropy` gives the same by tiles.
    Patch(
        "transformers.trainer_pt_utils:LabelSmoother.__call__",
        "trainer:label_smoothed_loss(self, model_output, labels, shift_labels)",
    ),
    # --- Until TRL leaves device_map alone.
    # Drops `device_map` with a warning: TRL sets it to auto, which fills the GPU.
    Patch("transformers.modeling_utils:PreTrainedModel.from_pretrained", "trainer:from_pretrained(cls, kwargs)"),
    # --- Until torch tells of reads and writes through parameter.data, or the caller writes to the parameter itself.
    # Takes the model apart through parameter.data: the engine gives the model back first, with all steps applied.
    Patch(f"{_TUNER}.merge_and_unload", "shared_parts:leave_then(self)"),
    Patch(f"{_TUNER}.unload", "shared_parts:leave_then(self)"),
    # Reads and writes parameter.data: steps must be applied before it, and its writes taken over after it.
    Patch(f"{_TUNER}.merge_adapter", "shared_parts:write_through(self)"),
    Patch(f"{_TUNER}.unmerge_adapter", "shared_parts:write_through(self)"),
    Patch("peft.utils.hotswap:hotswap_adapter_from_state_dict", "shared_parts:swap_adapter(model)", since="0.14.0"),
    Patch(
        "trl.trainer.callbacks:SyncRefModelCallback.sync_target_model",
        "shared_parts:sync_target_model(model, target_model, alpha)",
    ),
    # Unmerges merged adapters through parameter.data.
    Patch(f"{_TUNER}.set_adapter", "shared_parts:unmerge_first(self)"),
    # --- Until PEFT unmerges at this call.
    # Unmerges merged adapters when a layer next runs, when its weights are in a slot.
    Patch(f"{_TUNER}.disable_adapter_layers", "shared_parts:unmerge_first(self)"),
)
"""The comment above each patch says why a hook, a subclass or a setting won't do; that above each group, when it can go."""
