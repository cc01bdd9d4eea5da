"""Synonyms: what other trainers and engines call a key (Hugging Face's Trainer, TRL, SpecForge,
speculators, vLLM): ours, or why there is none. One table for all commands.
"""

from __future__ import annotations

from collections.abc import Collection

# Ours, of "A|B" the first that a command has, with a value where their name says it -> theirs.
OURS = {
    "optim.lr": "learning_rate peak_lr",
    "optim.schedule": "lr_scheduler_type lr_scheduler scheduler_type scheduler",
    "optim.warmup": "warmup_ratio warmup_steps num_warmup_steps scheduler_warmup_steps",
    "optim.clip": "max_grad_norm grad_clip gradient_clipping clip_grad_norm",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon",
    "steps": ("max_steps num_steps total_steps max_num_steps train_steps scheduler_total_steps"),
    "epochs": "num_epochs num_train_epochs",
    "batch_size|batch": "train_batch_size global_batch_size max_num_seqs batch_size batch",
    "micro_batch": "per_device_train_batch_size micro_batch_size",
    "eval.batch_size": "per_device_eval_batch_size eval_batch_size",
    "eval.every": "eval_steps eval_interval",
    "save_every": "save_steps save_interval checkpoint_freq",
    "log_every": "logging_steps log_interval log_freq log_steps",
    "keep": "save_total_limit",
    "out_dir|out": "output_dir save_path save_dir output output_path out_dir out",
    "start": "from_pretrained ckpt_dir init_from load_from_checkpoint",
    "seed": "data_seed random_seed",
    "device=cpu": "use_cpu no_cuda",
    "dtype=bfloat16": "bf16 bf16_full_eval",
    "dtype": "fp16 fp16_full_eval torch_dtype mixed_precision precision hidden_states_dtype",
    "trackers|wandb": "report_to logger log_with tracker",
    "wandb_project": "project project_name",
    "quiet": "disable_tqdm",
    "profile": "profile_start_step profile_num_steps",
    "shard_target": "fsdp fsdp_config tp_size tensor_parallel_size",
    "data.max_length|longest": (
        "max_seq_length max_seq_len seq_len seq_length max_length sequence_length "
        "total_seq_len cutoff_len block_length max_model_len"
    ),
    "data.path|prompts": ("data_path train_data_path train_file train_data dataset_path data_file"),
    "data=hub data.name": "dataset_name dataset_id dataset",
    "data.split": "dataset_split train_split",
    "data.held_out": "eval_data_path eval_dataset validation_file validation_split val_split",
    "data.features": "hidden_states_path train_hidden_states_path",
    "data.workers": (
        "dataloader_num_workers num_workers num_proc dataset_num_proc "
        "build_dataset_num_proc preprocessing_num_workers"
    ),
    "target": (
        "model model_name model_path model_id model_name_or_path target_model "
        "target_model_path base_model base_model_name_or_path verifier_name_or_path "
        "pretrained_model_name_or_path"
    ),
    "target.revision": "model_revision",
    "target.attn": "attn_implementation attention_backend",
    "target.quantize": "quantization load_in_8bit load_in_4bit",
    "head": "speculator_type head_type",
    "head.draft_vocab": "draft_vocab_size",
    "head.steps": "ttt_length ttt_steps",
    "head.step_decay": "ttt_step_loss_decay",
    "head.layers": "num_layers num_draft_layers num_hidden_layers",
    "head.heads": "num_heads medusa_num_heads",
    "head.depth|head.heads": (
        "num_speculative_tokens num_speculative_steps speculative_num_steps num_depths "
        "num_assistant_tokens"
    ),
    "head.taps|taps": "target_layer_ids aux_hidden_state_layer_ids layer_ids",
    "head.block": "block_size",
    "head.anchors": "max_anchors num_anchors",
    "head.noise": "noise_std",
    "head.loss": "loss_fn loss_type",
    "head.mask_token": "mask_token_id",
    "head.hidden_act": "draft_hidden_act",
    "head.activation_checkpointing": (
        "gradient_checkpointing activation_checkpointing activation_checkpointing_kwargs "
        "gradient_checkpointing_kwargs"
    ),
    "drafters|drafter": (
        "speculative_model draft_model draft_model_path assistant_model "
        "speculative_draft_model_path"
    ),
    "max_new_tokens": "max_tokens max_completion_tokens max_length",
    "num_prompts|num_conversations": "num_samples max_samples num_examples limit",
    "suite": "benchmark benchmarks task tasks",
    "base_url|url": "api_base server_url endpoint vllm_endpoint base_url url",
    "name": "served_model_name",
    "gpus": "num_gpus n_gpus",
}
# Why there is none -> theirs.
NONE = {
    "several processes are started by `--launch N` of train or by a file of "
    "conf/launch, and shard_target=true spreads a target that fits no GPU": (
        "deepspeed deepspeed_config local_rank fsdp fsdp_config tp_size "
        "tensor_parallel_size sp_ulysses_size sp_ring_size ddp_backend ddp_timeout "
        "ddp_find_unused_parameters dist_timeout parallelism_config accelerator_config "
        "num_processes nproc_per_node num_gpus n_gpus gpus devices world_size"
    ),
    "batch_size is that of a whole step, micro_batch that of a pass": (
        "gradient_accumulation_steps draft_accumulation_steps accumulate_grad_batches "
        "auto_find_batch_size"
    ),
    "the same command goes on where it was stopped; leave it out": (
        "resume resume_from_checkpoint no_resume_from_checkpoint resume_from auto_resume "
        "ignore_data_skip"
    ),
    "no run is overwritten, a folder of another one is refused; give another folder": (
        "overwrite overwrite_output_dir force"
    ),
    "`outrider validate dry_run=true` with the same keys foretells a run": "dry_run",
    "a run is named by its folder; leave it out": ("run_name wandb_name wandb_run_name exp_name"),
    "metrics lie in the run folder; leave it out": "logging_dir log_dir log_level",
    "a drafter's name says it: DRAFTER@chain:3": (
        "num_speculative_tokens num_speculative_steps speculative_num_steps num_assistant_tokens"
    ),
    "the draft has the target's shape, but for the keys under head.": (
        "draft_model_config draft_config draft_arch"
    ),
    "the target's own template is taken; leave it out": "chat_template is_preformatted",
    "answers alone are supervised; leave it out": (
        "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt"
    ),
    "the optimizer is AdamW, with the keys under optim.": "optimizer optim_args muon_lr",
    "the whole head is trained, and the target stays as it is": (
        "use_peft peft_config lora_r lora_alpha lora_rank lora_target_modules"
    ),
    "a run trains, and measures by the keys under eval.; leave it out": (
        "do_train do_eval do_predict eval_strategy evaluation_strategy save_strategy "
        "logging_strategy"
    ),
    "best/ keeps the longest accepted length; leave it out": (
        "load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    "`outrider push` publishes a run": (
        "push_to_hub hub_model_id hub_token hub_private_repo hub_revision hub_strategy"
    ),
    "the environment says it: OUTRIDER_CACHE, and HF_HOME for the hub": (
        "cache_dir model_download_dir"
    ),
    "the draft vocabulary is counted in the data, head.draft_vocab tokens": (
        "d2t_path t2d_path token_freq_path"
    ),
    "rows have one of the forms in docs/data.md, whatever else they hold": (
        "dataset_text_field remove_unused_columns label_names dataset_config_name dataset_config"
    ),
    "kernels are chosen by themselves; leave it out": (
        "torch_compile use_liger_kernel tf32 use_flash_attn flash_attention"
    ),
}


CURES = {name: ours.split("|") for ours, names in OURS.items() for name in names.split()}
REASONS = {name: why for why, names in NONE.items() for name in names.split()}


def said(key: str, known: Collection[str]) -> str:
    """What to say of a key that a command lacks and others know; "" for no word of theirs.
    known: the command's own keys."""
    for name in (key.replace(".", "_"), key.rpartition(".")[2]):
        for cure in CURES.get(name, []):
            if {word.partition("=")[0] for word in cure.split()} <= {*known}:
                return f"did you mean {cure}?"
        if name in REASONS:
            return REASONS[name]
        if name in CURES:
            return f"{CURES[name][0]} is that, in commands and heads that have it"
    return ""
