from __future__ import annotations

from typing import Any

import pytest

from megatron01.config import GPTPretrainConfig
from megatron01.config.fields import Settings
from megatron01.contrib.deepspeed import Row, Translation, translate
from megatron01.errors import UserError

SETTINGS = Settings(GPTPretrainConfig)


def translated(content: dict[str, Any], replicas: int = 8, **sources: Any) -> Translation:
    return translate(content, SETTINGS, replicas=replicas, **{"from_files": {}, "from_flags": {}, **sources})


def values(content: dict[str, Any], **sources: Any) -> dict[str, Any]:
    """Translated settings by name, without the section."""
    return {key.split(".")[1]: value for key, value in translated(content, **sources).values.items()}


def row(translation: Translation, field: str) -> Row:
    (found,) = [row for row in translation.rows if row.field == field]
    return found


def fails(content: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        translated(content)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def optimizer(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": parameters}}


def scheduler(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": parameters}}


BERT_ZERO_ONE = {  # DeepSpeed's example for BERT at 128 tokens
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 16,
    "steps_per_print": 100,
    "prescale_gradients": False,
    **optimizer(
        "ZeroOneAdam",
        lr=4e-4,
        weight_decay=0.01,
        bias_correction=False,
        var_freeze_step=12500,
        local_step_scaler=32678,
        cuda_aware=False,
        comm_backend_name="nccl",
    ),
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
}


def test_the_example_for_zero_one_adam() -> None:
    translation = translated(BERT_ZERO_ONE, replicas=64)
    config = SETTINGS.build(translation.values)
    assert translation.not_honoured == []
    assert (config.optimizer.optimizer, config.optimizer.lr, config.optimizer.weight_decay) == (
        "zero_one_adam",
        4e-4,
        0.01,
    )
    assert config.optimizer.variance_freeze_step == 12501
    assert config.optimizer.sync_policy == "doubling:12501,32678"
    assert (config.optimizer.variance_kappa, config.optimizer.max_sync_interval) == (16, 16)
    assert (config.optimizer.variance_decay, config.optimizer.variance_bias_correction) == ("per_refresh", False)
    assert (config.training.global_batch_size, config.training.micro_batch_size) == (4096, 16)
    assert config.training.accumulation_steps(64) == 4
    assert (config.training.precision, config.training.initial_loss_scale, config.training.loss_scale) == (
        "fp16",
        65536,
        None,
    )
    assert (config.optimizer.clip_grad, config.logging.log_interval) == (1.0, 100)


def test_the_example_for_one_bit_adam() -> None:
    content = BERT_ZERO_ONE | optimizer(
        "OneBitAdam", lr=4e-4, weight_decay=0.01, freeze_step=23000, comm_backend_name="mpi"
    )
    translation = translated(content, replicas=64)
    config = SETTINGS.build(translation.values)
    assert (config.optimizer.optimizer, config.optimizer.freeze_step) == ("one_bit_adam", 23000)
    assert not config.optimizer.variance_bias_correction and config.optimizer.variance_decay == "elapsed"
    assert translation.not_honoured == [] and config.distributed.comm_backend == "mpi"


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"comm_backend_name": "nccl", "cuda_aware": True}, ("torch", False)),
        ({"comm_backend_name": "mpi", "cuda_aware": True}, ("mpi", True)),
        ({"comm_backend_name": "mpi", "cuda_aware": False}, ("mpi", False)),
        ({"cuda_aware": True}, ("torch", False)),
    ],
)
def test_the_transport_of_the_bits(params: dict[str, Any], expected: tuple[str, bool]) -> None:
    settings = SETTINGS.build(translated(optimizer("ZeroOneAdam", **params), replicas=1).values).distributed
    assert (settings.comm_backend, settings.cuda_aware) == expected


def test_the_example_for_gpt_2_with_zero() -> None:
    content = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        **optimizer("Adam", lr=0.00015, betas=[0.9, 0.95], eps=1e-6),
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2},
        "activation_checkpointing": {"partition_activations": True},
    }
    translation = translated(content)
    assert translation.not_honoured == [
        "zero_optimization.stage",
        "activation_checkpointing",
        "zero_optimization.overlap_comm",
    ]
    config = SETTINGS.build(translation.values)
    assert (config.optimizer.optimizer, config.optimizer.adam_beta2, config.optimizer.adam_eps) == ("adam", 0.95, 1e-6)
    assert config.optimizer.weight_decay == 0.0  # DeepSpeed's default
    training = config.training
    assert (training.loss_scale_window, training.hysteresis, training.min_loss_scale) == (500, 3, 2)
    assert (training.micro_batch_size, training.global_batch_size) == (2, 16)


def test_an_empty_file_changes_nothing() -> None:
    assert translated({}) == Translation({}, [])
    files = {"optimizer.lr": 3.0}
    assert translated({}, from_files=files).values == files


def test_deepspeeds_defaults_hold_for_the_optimizer_that_it_chooses() -> None:
    ours = values(optimizer("ZeroOneAdam"))
    assert ours["lr"] == 1e-3 and ours["weight_decay"] == 0.0
    assert ours["local_scale"] == 1.0
    assert ours["variance_freeze_step"] == 100001 and ours["sync_policy"] == "doubling:100001,32678"
    assert values(optimizer("OneBitAdam"))["freeze_step"] == 100000
    assert "freeze_step" not in values(optimizer("AdamW")) and "sync_policy" not in values(optimizer("AdamW"))
    assert values(optimizer("AdamW", torch_adam=True))["weight_decay"] == 0.01
    assert values(optimizer("Adam", torch_adam=True, adam_w_mode=False))["weight_decay"] == 0.0
    assert values(optimizer("AdamW", torch_adam=True, adam_w_mode=False))["weight_decay"] == 0.01  # as its name says
    assert values(optimizer("AdamW", torch_adam=True, weight_decay=0.2))["weight_decay"] == 0.2
    shown = row(translated(optimizer("ZeroOneAdam")), "optimizer.params.lr")
    assert (shown.value, shown.here) == ("0.001 (default)", "lr 0.001")


def test_names_of_optimizers_are_compared_without_case() -> None:
    for kind in ("ZeroOneAdam", "OneBitAdam", "AdamW"):
        assert values(optimizer(kind.lower())) == values(optimizer(kind))


@pytest.mark.parametrize("kind", ["ZeroOneAdam", "OneBitAdam"])
def test_the_table_shows_that_there_is_no_bound_on_steps(kind: str) -> None:
    """A setting that is turned off counts as changed."""
    assert "step_bound 0" in row(translated(optimizer(kind)), "optimizer.type").here
    kept = translated(optimizer(kind), from_files={"optimizer.step_bound": 2.0})
    assert "step_bound" not in row(kept, "optimizer.type").here
    scale = row(translated({"fp16": {"enabled": True, "loss_scale": 0}}), "fp16.loss_scale")
    assert scale.here == ""  # dynamic, which is the default


def test_config_files_win_over_deepspeeds_defaults_and_lose_against_what_the_file_says() -> None:
    files = {
        "optimizer.lr": 3e-4,
        "optimizer.weight_decay": 0.1,
        "optimizer.variance_decay": "elapsed",
        "model.num_layers": 3,
    }
    translation = translated(optimizer("ZeroOneAdam", weight_decay=0.2), from_files=files)
    assert translation.values["optimizer.lr"] == 3e-4 and translation.values["model.num_layers"] == 3
    assert translation.values["optimizer.weight_decay"] == 0.2
    assert translation.values["optimizer.variance_decay"] == "elapsed"
    assert row(translation, "optimizer.params.weight_decay").remark.endswith("wins over weight_decay 0.1 of --config")
    assert not any(row.field == "optimizer.params.lr" for row in translation.rows)
    assert "variance_decay" not in row(translation, "optimizer.type").here


def test_flags_win_and_the_table_says_so() -> None:
    translation = translated(
        optimizer("AdamW", lr=1e-3), from_files={"optimizer.lr": 1.0}, from_flags={"optimizer.lr": 2e-3}
    )
    assert row(translation, "optimizer.params.lr").remark == "the flag --lr 0.002 wins"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (scheduler("WarmupLR", warmup_min_lr=1e-6, warmup_max_lr=2e-4, warmup_num_steps=1, warmup_type="linear"),
         {"lr": 2e-4, "lr_warmup_init": 1e-6, "lr_warmup_iters": 2, "lr_decay_style": "constant"}),
        (scheduler("WarmupDecayLR", total_num_steps=900, warmup_min_lr=1e-5),
         {"lr": 1e-3, "min_lr": 1e-5, "lr_warmup_init": 1e-5, "lr_warmup_iters": 1000, "lr_decay_iters": 900,
          "lr_decay_style": "linear"}),
        (optimizer("Adam", lr=4e-4)
         | scheduler("WarmupCosineLR", total_num_steps=900, warmup_min_ratio=0.5, cos_min_ratio=0.25),
         {"lr": 4e-4, "min_lr": 1e-4, "lr_warmup_init": 2e-4, "lr_decay_style": "cosine", "lr_decay_iters": 900}),
        (optimizer("Adam") | scheduler("WarmupCosineLR", total_num_steps=9, cos_min_ratio=0.5),
         {"lr": 1e-3, "min_lr": 5e-4}),
        (optimizer("Adam", lr=7e-4) | scheduler("WarmupDecayLR", total_num_steps=9), {"lr": 1e-3}),
        (optimizer("Adam", lr=7e-4) | scheduler("WarmupLR", warmup_max_lr=6e-4), {"lr": 6e-4}),
        (optimizer("Adam", lr=7e-4) | scheduler("WarmupLR"), {"lr": 7e-4}),
    ],
)  # fmt: skip
def test_schedulers(content: dict[str, Any], expected: dict[str, Any]) -> None:
    ours = values(content)
    assert {name: ours[name] for name in expected} == expected


def test_a_ratio_is_of_the_rate_that_the_run_will_have() -> None:
    content = optimizer("Adam", lr=4e-4) | scheduler("WarmupCosineLR", total_num_steps=9, cos_min_ratio=0.5)
    assert values(content, from_flags={"optimizer.lr": 1e-2})["min_lr"] == 5e-3
    assert values(content, from_files={"optimizer.lr": 1e-2})["min_lr"] == 2e-4  # the file's wins
    alone = scheduler("WarmupCosineLR", total_num_steps=9, cos_min_ratio=0.5)
    assert values(alone, from_files={"optimizer.lr": 1e-2})["min_lr"] == 5e-3


def test_a_rate_that_the_scheduler_overrides_is_told() -> None:
    translation = translated(optimizer("Adam", lr=7e-4) | scheduler("WarmupLR", warmup_max_lr=6e-4))
    assert row(translation, "optimizer.params.lr").remark == "scheduler.params.warmup_max_lr wins"


def test_a_warm_up_in_steps_replaces_one_as_a_share() -> None:
    files = {"optimizer.lr_warmup_fraction": 0.1}
    translation = translated(scheduler("WarmupLR", warmup_num_steps=50, warmup_type="linear"), from_files=files)
    config = SETTINGS.build(translation.values)
    assert (config.optimizer.lr_warmup_iters, config.optimizer.lr_warmup_fraction) == (50, None)
    assert translation.not_honoured == []


def test_the_logarithmic_warm_up_is_not_honoured_also_where_it_is_the_default() -> None:
    assert translated(scheduler("WarmupLR")).not_honoured == ["scheduler.params.warmup_type"]
    assert translated(scheduler("WarmupLR", warmup_type="log")).not_honoured == ["scheduler.params.warmup_type"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 10}},
         {"precision": "fp16", "loss_scale": 128.0, "initial_loss_scale": 1024.0}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
        ({"bfloat16": {"enabled": True}, "fp16": {"enabled": False}}, {"precision": "bf16"}),
        ({"fp16": {"enabled": False}}, {"precision": "fp32"}),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, {"precision": "fp32"}),  # the new name's wins
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"accumulate_grads_in_fp32": True}),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, {"accumulate_grads_in_fp32": False}),
        ({"communication_data_type": "bfp16"}, {"gradient_wire_dtype": "bf16"}),
        ({"gradient_clipping": 0}, {"clip_grad": 0.0}),
        ({"steps_per_print": 5e1}, {"log_interval": 50}),
        ({"steps_per_print": None}, {}),
    ],
)  # fmt: skip
def test_precision_and_gradients(content: dict[str, Any], expected: dict[str, Any]) -> None:
    assert values(content) == expected


@pytest.mark.parametrize(
    ("content", "flags", "expected"),
    [({}, {}, "bf16"), ({"fp16": {"enabled": True}}, {}, "fp16"), ({}, {"training.precision": "fp16"}, "fp16")],
)
def test_full_steps_send_gradients_in_the_type_of_the_run(
    content: dict[str, Any], flags: dict[str, Any], expected: str
) -> None:
    sources = {"from_files": {"training.precision": "bf16"}, "from_flags": flags}
    assert values(optimizer("ZeroOneAdam") | content, **sources)["gradient_wire_dtype"] == expected


@pytest.mark.parametrize(
    "content",
    [
        optimizer("Adam", bias_correction=False),
        optimizer("Adam", adam_w_mode=False),
        optimizer("Adam") | {"communication_data_type": "fp32"},
        {"fp16": {"enabled": True, "consecutive_hysteresis": True}},
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
        {"gradient_allreduce_op": "sum"},
        scheduler("WarmupLR", warmup_type="linear", last_batch_iteration=5),
        {"sparse_gradients": True},
        optimizer("AdamW", amsgrad=True),
        optimizer("AdamW", max_grad_norm=1.0),
        {"wall_clock_breakdown": True},
        {"wandb": {"enabled": True, "project": "p"}},
        {"curriculum_learning": {"enabled": True}},
        {"my_own_note": "x"},
        {"train_batch_size": "auto"},
    ],
)
def test_what_cannot_be_honoured_is_named(content: dict[str, Any]) -> None:
    (name,) = translated(content).not_honoured
    remark = row(translated(content), name).remark
    assert remark and not remark.startswith("as here")


@pytest.mark.parametrize(
    "content",
    [
        optimizer("ZeroOneAdam", bias_correction=True, eps_inside_sqrt=True, exp_avg_mask=None, amsgrad=False),
        optimizer("AdamW", adam_w_mode=True, torch_adam=True, bias_correction=True),
        optimizer("AdamW", adam_w_mode=False),  # DeepSpeed follows the name
        optimizer("OneBitAdam") | {"communication_data_type": "fp32"},
        {"communication_data_type": "fp32"},
        scheduler("WarmupLR", warmup_type="linear", last_batch_iteration=-1),
        {"zero_optimization": {"stage": 0, "reduce_bucket_size": 5e8}, "zero_allow_untested_optimizer": True},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0, "gradient_allreduce_op": "mean"},
        {"flops_profiler": {"enabled": False}, "compression_training": {}, "wall_clock_breakdown": False},
        {"bf16": {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}},
    ],
)
def test_what_is_so_anyway_is_honoured(content: dict[str, Any]) -> None:
    assert translated(content).not_honoured == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (optimizer("OneBitLamb", max_coeff=1),
         "optimizer.type is 'OneBitLamb', which is not supported (there is no layer-wise optimizer); expected "
         "ZeroOneAdam, OneBitAdam, Adam or AdamW, or no section optimizer, and --optimizer bin_sgdm, soft_sign_sgd or "
         "sgdm"),
        (optimizer("SGD", lr=0.1),
         "optimizer.type is 'SGD', which is not supported; expected ZeroOneAdam, OneBitAdam, Adam or AdamW, or no "
         "section optimizer, and --optimizer bin_sgdm, soft_sign_sgd or sgdm"),
        (optimizer("Adam", var_freeze_step=3),
         "optimizer.params.var_freeze_step: Adam has no such parameter; remove it"),
        (optimizer("ZeroOneAdam", freeze_step=3),
         "optimizer.params.freeze_step: ZeroOneAdam has no such parameter; did you mean 'var_freeze_step'?"),
        (optimizer("OneBitAdam", freze_step=3),
         "optimizer.params.freze_step is no field that DeepSpeed knows; did you mean 'freeze_step'?"),
        ({"optimizer": {"params": {"lr": 1.0}}},
         "optimizer.params.lr is given without optimizer.type; DeepSpeed would ignore it: give the type"),
        (optimizer("ZeroOneAdam") | {"zero_optimization": {"stage": 1}},
         "zero_optimization.stage is 1, but ZeroOneAdam needs stage 0, in DeepSpeed too"),
        (scheduler("OneCycle", cycle_min_lr=1),
         "scheduler.type is 'OneCycle', which is not supported; expected WarmupLR, WarmupDecayLR, WarmupCosineLR, or "
         "no section scheduler, and --lr-decay-style with --lr-warmup-iters"),
        (scheduler("WarmupCosineLR"),
         "scheduler.params.total_num_steps is not given; WarmupCosineLR needs it, in DeepSpeed too"),
        (scheduler("WarmupLR", total_num_steps=3),
         "scheduler.params.total_num_steps: WarmupLR has no such parameter; did you mean 'warmup_num_steps'?"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}},
         "fp16.enabled and bf16.enabled are both true; DeepSpeed refuses this too: keep one of them"),
        ({"gradient_cliping": 1.0},
         "gradient_cliping is no field that DeepSpeed knows; did you mean 'gradient_clipping'?"),
        ({"fp16": {"enabeld": True}}, "fp16.enabeld is no field that DeepSpeed knows; did you mean 'enabled'?"),
        ({"fp16": True}, "fp16 is true; expected an object of fields"),
        ({"optimizer": []}, "optimizer is []; expected an object of fields"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled is 'yes'; expected true or false"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping is '1.0'; expected a number"),
        ({"gradient_clipping": True}, "gradient_clipping is true; expected a number"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping is nan; expected a number"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping is inf; expected a number"),
        ({"gradient_clipping": 10**400}, f"gradient_clipping is {10**400}; expected a number"),
        ({"steps_per_print": 1.5}, "steps_per_print is 1.5; expected a positive whole number"),
        (optimizer("ZeroOneAdam", local_step_scaler=0),
         "optimizer.params.local_step_scaler is 0; expected a positive whole number"),
        ({"fp16": {"initial_scale_power": 5000}},
         "fp16.initial_scale_power is 5000; expected a whole number whose power of 2 fits fp32, -126 to 127"),
        ({"optimizer": {"type": 3}}, "optimizer.type is 3; expected text"),
        (optimizer("Adam", betas=[0.9]), "optimizer.params.betas is [0.9]; expected a list of two numbers"),
        (optimizer("Adam", betas={"a": 1}), "optimizer.params.betas is {...}; expected a list of two numbers"),
        ({"communication_data_type": "int8"}, "communication_data_type is 'int8'; expected fp32, fp16 or bf16"),
        ({"train_batch_size": 100, "train_micro_batch_size_per_gpu": 16},
         "train_batch_size 100 is not a multiple of train_micro_batch_size_per_gpu 16 x 8 replicas; DeepSpeed refuses "
         "this too: change one of them"),
        ({"gradient_accumulation_steps": 2},
         "gradient_accumulation_steps is given alone; DeepSpeed needs train_batch_size or "
         "train_micro_batch_size_per_gpu beside it"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(content: dict[str, Any], message: str) -> None:
    assert fails(content) == message


def test_fields_left_to_another_program_stay_as_they_are() -> None:
    content = {
        "train_batch_size": "auto",
        **optimizer("AdamW", lr="auto", weight_decay=0.1),
        **scheduler("WarmupDecayLR", total_num_steps="auto", warmup_max_lr="auto", warmup_type="linear"),
        "fp16": {"enabled": "auto"},
    }
    translation = translated(content)
    assert translation.not_honoured == [
        "train_batch_size",
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_max_lr",
        "fp16.enabled",
    ]
    ours = {key.split(".")[1] for key in translation.values}
    assert not ours & {"lr", "global_batch_size", "lr_decay_iters", "precision"} and "weight_decay" in ours


AUTO_SIZES = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({}, {"global_batch_size": 4 * 4 * 8}),
        ({"from_files": {"training.micro_batch_size": 2}}, {"micro_batch_size": 2, "global_batch_size": 2 * 4 * 8}),
        ({"from_flags": {"training.micro_batch_size": 2}}, {"global_batch_size": 2 * 4 * 8}),
        ({"from_files": {"training.global_batch_size": 512}}, {"global_batch_size": 512, "micro_batch_size": 16}),
    ],
)
def test_a_fixed_accumulation_with_sizes_left_to_another_program_is_followed(
    sources: dict[str, Any], expected: dict[str, int]
) -> None:
    assert values(AUTO_SIZES, **sources) == expected
    assert translated(AUTO_SIZES, **sources).not_honoured == []
    only_one = {name: value for name, value in AUTO_SIZES.items() if name != "train_batch_size"}
    assert values(only_one, **sources) == expected


def test_sizes_that_do_not_fit_a_fixed_accumulation_are_named() -> None:
    with pytest.raises(UserError) as caught:
        translated(AUTO_SIZES, from_files={"training.global_batch_size": 100})
    assert "train_batch_size 100 is not a multiple of gradient_accumulation_steps 4 x 8 replicas" in str(caught.value)
    both = {"training.global_batch_size": 100, "training.micro_batch_size": 2}
    assert row(translated(AUTO_SIZES, from_flags=both), "gradient_accumulation_steps").remark.endswith(
        "the flag --global-batch-size 100 wins"
    )


def test_a_fixed_accumulation_beside_one_batch_size_gives_the_other() -> None:
    assert values({**AUTO_SIZES, "train_batch_size": 64}) == {"global_batch_size": 64, "micro_batch_size": 2}
    assert values({**AUTO_SIZES, "train_micro_batch_size_per_gpu": 3}) == {
        "micro_batch_size": 3,
        "global_batch_size": 3 * 4 * 8,
    }


def test_every_setting_that_fields_set_exists() -> None:
    everything = {
        "train_batch_size": 16,
        **optimizer("ZeroOneAdam"),
        **scheduler("WarmupCosineLR", total_num_steps=3),
        "fp16": {
            "enabled": True,
            "loss_scale": 1,
            "initial_scale_power": 1,
            "loss_scale_window": 1,
            "min_loss_scale": 1,
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": 1,
        "steps_per_print": 1,
    }
    for content in (everything, everything | optimizer("OneBitAdam")):
        assert translated(content).values.keys() <= SETTINGS.by_key.keys()
        SETTINGS.build(translated(content).values)
