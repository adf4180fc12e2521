"""From a user's choices to a complete run, on made-up machines."""

import pytest
from run_helpers import gpu, machine

from tfbench.config import ConfigError
from tfbench.defaults import complete
from tfbench.kernels import obstacle
from tfbench.models import MODELS

H200, V100, PASCAL = (
    gpu(),
    gpu(name="Tesla V100-SXM2-32GB", memory_gib=32.0, compute_capability=(7, 0)),
    gpu(name="Tesla P100-PCIE-16GB", memory_gib=16.0, compute_capability=(6, 1)),
)
ADA = gpu(name="NVIDIA L40S", memory_gib=48.0, compute_capability=(8, 9))
UNKNOWN_CAPABILITY = gpu(compute_capability=None, memory_gib=None)


def config_of(here, **choices):
    """What `complete` makes of these choices, ResNet-50 unless told otherwise."""
    return complete({"model": "resnet50", "gpus": "auto"} | choices, here)[0]


def sentences_of(here, **choices):
    return complete({"model": "resnet50", "gpus": "auto"} | choices, here)[1]


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [
        ((), "auto", 0),
        ((H200,), "auto", 1),
        ((H200,) * 4, "auto", 4),
        ((H200,) * 4, "2", 2),
        ((H200,) * 4, 3, 3),
        ((H200,) * 4, "0", 0),
        ((), "0", 0),
    ],
)
def test_number_of_gpus(gpus, asked, expected):
    assert config_of(machine(*gpus), gpus=asked).gpus == expected


def test_auto_without_a_gpu_says_why():
    assert "No GPU is used: no driver here." in sentences_of(machine())
    assert not any("No GPU" in sentence for sentence in sentences_of(machine(), gpus="0"))


MIG = gpu(is_mig=True, memory_gib=18.0)


@pytest.mark.parametrize(
    ("gpus", "asked", "words"),
    [
        ((H200, H200), "4", ("--gpus=4: only 2 visible", "--gpus=auto", "--gpus=0")),
        ((), "1", ("--gpus=1: none is visible: no driver here", "--gpus=0 the CPU")),
        ((H200,), "-1", ("--gpus=-1: a whole number of at least 0",)),
        ((H200,), "two", ("--gpus=two: a whole number, or auto",)),
        ((H200,), "1.5", ("--gpus=1.5: a whole number, or auto",)),
        ((H200,), "", ("--gpus=: a whole number, or auto",)),
        ((MIG,), "2", ("--gpus=2: CUDA opens one MIG slice in a process: use --gpus=1",)),
        ((MIG, MIG), "2", ("--gpus=2: CUDA opens one MIG slice in a process: use --gpus=1",)),
    ],
)
def test_gpus_that_cannot_be(gpus, asked, words):
    with pytest.raises(ConfigError) as refused:
        config_of(machine(*gpus), gpus=asked)
    for word in words:
        assert word in str(refused.value)


def test_one_mig_slice_is_a_gpu():
    assert config_of(machine(MIG)).gpus == 1


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((H200,), "mixed_float16"),
        ((V100,), "mixed_float16"),
        ((PASCAL,), "fp32"),
        ((H200, PASCAL), "fp32"),  # the slowest card sets the pace
        ((), "fp32"),
    ],
)
def test_default_precision_is_the_fastest_that_runs_well(gpus, expected):
    assert config_of(machine(*gpus)).precision == expected


@pytest.mark.parametrize(
    ("card", "precision", "least"),
    [(PASCAL, "mixed_float16", "7.0"), (PASCAL, "mixed_bfloat16", "8.0"), (V100, "mixed_bfloat16", "8.0")],
)
def test_mixed_precision_without_matrix_units_runs_but_is_doubted(card, precision, least):
    config, sentences = complete({"model": "resnet50", "gpus": "auto", "precision": precision}, machine(card))
    assert config.precision == precision
    (doubt,) = sentences
    version = ".".join(map(str, card.compute_capability))
    assert f"--precision={precision} will not be faster than fp32" in doubt
    assert f"compute capability {least}, this GPU has {version}." in doubt


@pytest.mark.parametrize("precision", ["fp32", "tf32", "mixed_float16", "mixed_bfloat16"])
def test_precision_that_the_card_knows_is_not_doubted(precision):
    assert sentences_of(machine(H200), precision=precision) == []


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ((), "--precision=tf32: a GPU only has TF32; the CPU computes fp32"),
        ((V100,), "--precision=tf32: needs compute capability 8.0, this GPU has 7.0: fp32"),
        ((H200, V100), "--precision=tf32: needs compute capability 8.0, this GPU has 7.0: fp32"),
    ],
)
def test_tf32_is_refused_where_it_would_silently_be_fp32(gpus, words):
    with pytest.raises(ConfigError, match=words):
        config_of(machine(*gpus), precision="tf32")


@pytest.mark.parametrize(
    ("card", "precision", "expected"),
    [
        # ResNet-50 takes 41 MiB a sample in half precision: 256 of them 10.25 GiB.
        (gpu(memory_gib=16.0), "mixed_float16", 256),  # 80 % of 16 GiB are 12.8
        (gpu(memory_gib=12.0), "mixed_float16", 128),  # 9.6 GiB hold 128, 5.1 GiB
        (gpu(memory_gib=16.0), "fp32", 128),  # twice as much each: 256 would be 20.5 GiB, 128 are 10.25
        (gpu(memory_gib=0.1), "mixed_float16", 8),  # no smaller than a row of the tensor cores
        (gpu(memory_gib=None), "mixed_float16", 1024),
    ],
)
def test_default_batch_fits_the_memory(card, precision, expected):
    assert MODELS["resnet50"].activation_mib_per_sample == 41.0
    config = config_of(machine(H200, card), precision=precision)
    assert config.per_replica_batch_size == expected


def test_own_choices_are_never_changed():
    own = {
        "per_replica_batch_size": 1000,
        "image_size": 100,
        "precision": "fp32",
        "xla": False,
        "optimizer": "lamb",
        "learning_rate": 7.0,
        "lr_warmup_steps": 0,
        "weight_decay": 0.0,
        "steps": 3,
        "warmup_steps": 1,
        "windows": 2,
        "steps_per_loop": 3,
        "seed": 5,
        "tag": "mine",
    }
    for here in (machine(), machine(gpu(memory_gib=4.0))):
        config, sentences = complete({"model": "resnet50", "gpus": "auto"} | own, here)
        assert config.to_dict().items() >= own.items()
        assert not any("runs small" in sentence for sentence in sentences)


def test_no_choice_means_the_models_own_defaults_on_a_gpu():
    spec = MODELS["bert_base"]
    config = config_of(machine(H200), model="bert_base", learning_rate=None, xla=None)
    assert (config.optimizer, config.learning_rate) == (spec.optimizer, spec.learning_rate)
    assert (config.weight_decay, config.dropout) == (spec.weight_decay, spec.dropout)
    assert (config.seq_length, config.image_size) == (spec.on_gpu.seq_length, None)
    assert config.steps == spec.on_gpu.steps
    assert config.xla


def test_cpu_shrinks_the_run_and_says_so():
    config, sentences = complete({"model": "resnet50", "gpus": "0", "steps": 20}, machine())
    small = MODELS["resnet50"].on_cpu
    assert (config.per_replica_batch_size, config.image_size, config.xla) == (
        small.per_replica_batch_size,
        small.image_size,
        False,
    )
    (sentence,) = sentences
    assert (
        f"--per_replica_batch_size={small.per_replica_batch_size} --image_size={small.image_size}" in sentence
    )
    assert "--steps" not in sentence  # that one was the user's
    assert "try-out" in sentence


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"steps": 90, "warmup_steps": 10, "data": "digits"}, 10),
        ({"steps": 95, "data": "digits"}, 11),  # and the GPU's default of 20 before them: a tenth of 115, cut
        ({"steps": 90, "warmup_steps": 10, "data": "digits", "lr_warmup_steps": 0}, 0),
        ({"steps": 90, "warmup_steps": 10}, 10_000),  # one batch over and over: nothing to learn
        ({"steps": 90, "warmup_steps": 10, "lr_schedule": "cosine"}, 10),  # which is to reach 0
        ({"steps": 90, "warmup_steps": 10, "lr_warmup_steps": 7}, 7),
    ],
)
def test_learning_rate_rises_over_a_tenth_of_the_run(choices, expected):
    assert MODELS["resnet50"].on_gpu.warmup_steps == 20
    assert config_of(machine(H200), **choices).lr_warmup_steps == expected


def test_few_steps_need_no_windows_flag():
    config = config_of(machine(H200), steps=3)
    assert (config.steps, config.windows) == (3, 3)


def test_more_windows_than_steps_are_refused():
    with pytest.raises(ConfigError, match="--windows=1000: at most --steps=200"):
        config_of(machine(H200), windows=1000)


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"per_replica_batch_size": 100}, ["--per_replica_batch_size=100"]),
        ({"per_replica_batch_size": 96}, []),
        ({"model": "bert_base", "seq_length": 127}, ["--seq_length=127"]),
        ({"per_replica_batch_size": 100, "precision": "fp32"}, []),
        ({"per_replica_batch_size": 100, "gpus": "0"}, []),
    ],
)
def test_sizes_that_tensor_cores_dislike_are_named(choices, named):
    told = [s.partition(" ")[0] for s in sentences_of(machine(H200), **choices) if "multiple of 8" in s]
    assert told == named


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"seq_length": 128}, "--seq_length=128: resnet50 reads images: --image_size"),
        ({"model": "bert_tiny", "image_size": 64}, "--image_size=64: bert_tiny reads text: --seq_length"),
        ({"model": "bert_tiny", "seq_length": 4096}, "--seq_length=4096: at most 512 for bert_tiny"),
        ({"dropout": 0.1}, "--dropout=0.1: resnet50 has no dropout: 0"),
        ({"kernels": "plain"}, "--kernels=plain: resnet50 has no choice: leave the flag out"),
        ({"data_dir": "/sets"}, "--data_dir=/sets: goes with --data=tfds:NAME, not with --data=synthetic"),
        (
            {"initial_loss_scale": 1024.0, "precision": "mixed_bfloat16"},
            "--initial_loss_scale=1024.0: goes with --precision=mixed_float16 only, mixed_bfloat16 does not",
        ),
        ({"data": "imagenet"}, "--data=imagenet: one of synthetic, digits, pydoc, tfds:ARGUMENT"),
        ({"data": "tfds:"}, "--data=tfds:: tfds needs an argument"),
        ({"data": "pydoc"}, "--data=pydoc: pydoc has text, resnet50 reads images: digits"),
        ({"steps": 0}, "--steps=0: a whole number of at least 1"),
        ({"windows": 0}, "--windows=0: a whole number of at least 1"),
        ({"warmup_steps": 0}, "--warmup_steps=0: a whole number of at least 1: the first step"),
    ],
)
def test_what_the_model_or_the_data_rules_out(choices, message):
    with pytest.raises(ConfigError) as refused:
        config_of(machine(H200), **choices)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("card", "choices", "expected"),
    [
        (H200, {}, "fused"),
        (H200, {"kernels": "plain"}, "plain"),
        (H200, {"seq_length": 512}, "fused"),
        (H200, {"precision": "mixed_bfloat16"}, "plain"),
        (H200, {"kernels": "fused", "precision": "mixed_bfloat16", "seq_length": 512}, "fused"),
        (gpu(compute_capability=(8, 0)), {}, "plain"),
        (ADA, {}, "plain"),
        (gpu(compute_capability=(8, 0)), {"kernels": "fused"}, "fused"),
        (ADA, {"kernels": "fused"}, "fused"),
        (H200, {"model": "resnet50"}, None),
    ],
)
def test_kernels_are_fused_on_hopper_and_where_asked_for(card, choices, expected):
    assert config_of(machine(card), **{"model": "bert_base"} | choices).kernels == expected


@pytest.mark.parametrize(
    ("card", "precision", "is_said"),
    [(H200, "mixed_float16", False), (H200, "mixed_bfloat16", True), (ADA, "mixed_float16", True)],
)
def test_kernels_that_never_trained_there_are_called_so(card, precision, is_said):
    sentences = sentences_of(machine(card), model="bert_base", kernels="fused", precision=precision)
    assert ("has trained on Hopper in mixed_float16 only" in " ".join(sentences)) is is_said


HALF = "goes with --precision=mixed_float16 or mixed_bfloat16"
AMPERE = "needs compute capability 8.0, this GPU's is"


@pytest.mark.parametrize(
    ("here", "choices", "why"),
    [
        (machine(), {}, "goes with --xla on GPUs only"),
        (machine(H200), {"xla": False}, "goes with --xla on GPUs only"),
        (machine(H200), {"precision": "tf32"}, f"{HALF}, not tf32"),
        (machine(V100), {}, f"{AMPERE} 7.0"),
        (machine(H200, V100), {}, f"{AMPERE} 7.0"),
        (machine(UNKNOWN_CAPABILITY), {"precision": "mixed_float16"}, f"{AMPERE} unknown"),
        (machine(H200), {"seq_length": 96}, "goes with a --seq_length that is a multiple of 128, not 96"),
    ],
)
def test_kernels_are_plain_elsewhere_and_fused_is_refused(here, choices, why):
    assert config_of(here, model="bert_base", **choices).kernels == "plain"
    with pytest.raises(ConfigError) as refused:
        config_of(here, model="bert_base", kernels="fused", **choices)
    assert str(refused.value) == f"--kernels=fused: {why}; --kernels=plain runs everywhere"


def test_kernels_for_other_head_widths_are_plain():
    assert {spec.head_size for spec in MODELS.values()} == {None, 64}
    config = config_of(machine(H200), model="bert_base")
    assert obstacle(config, 32, (9, 0)) == "needs heads of width 64, this model's have 32"


def test_missing_data_is_named_with_path_and_remedy(tmp_path):
    with pytest.raises(ConfigError) as refused:
        config_of(machine(), data="tfds:imagenet2012", data_dir=str(tmp_path))
    message = str(refused.value)
    assert message.startswith("--data=tfds:imagenet2012: no prepared data set in ")
    assert str(tmp_path / "imagenet2012") in message
    assert "tfds build imagenet2012" in message


@pytest.mark.parametrize("here", [machine(), machine(H200), machine(V100, V100), machine(UNKNOWN_CAPABILITY)])
@pytest.mark.parametrize("model", list(MODELS))
def test_every_model_has_a_complete_default_run_everywhere(model, here):
    config = config_of(here, model=model)
    assert config.num_replicas == max(len(here.gpus), 1)
    assert (config.seq_length is None) != (config.image_size is None)


@pytest.mark.parametrize(
    ("steps", "windows", "warmup_steps", "steps_per_loop", "said"),
    [
        (4, 2, 1, 100, ["a window has 2 (--steps ÷ --windows), so every step runs by itself"]),
        (50, 1, 21, 100, ["so steps run in rows of 20 and single steps"]),
        (40, 1, 21, 100, ["so steps run in rows of 20."]),
        (40, 1, 20, 100, ["so steps run in rows of 20.", "--warmup_steps=20: 21 are made"]),
        (
            20,
            2,
            10,
            10,
            ["--warmup_steps=10: 11 are made, which hold the first row of 10 steps (--steps_per_loop=10)"],
        ),
        (20, 2, 11, 10, []),
        (20, 2, 1, 1, []),
    ],
)
def test_rows_that_run_otherwise_than_a_user_may_think(steps, windows, warmup_steps, steps_per_loop, said):
    choices = {"steps": steps, "windows": windows, "warmup_steps": warmup_steps}
    sentences = sentences_of(machine(H200), steps_per_loop=steps_per_loop, **choices)
    assert len(sentences) == len(said)
    for sentence, words in zip(sentences, said, strict=True):
        assert words in sentence


@pytest.mark.parametrize(
    ("card_gib", "choices", "expected"),
    [
        # ResNet-50: 41 MiB at 224 pixels, 164 at 448: 256 are 41 GiB, 512 are 82, and 80 % of 80 are 64.
        (80.0, {}, 1024),
        (80.0, {"image_size": 448}, 256),
        (12.0, {"image_size": 112}, 512),  # 10.25 MiB each: 5.1 GiB; 1024 would be 10.25 of 9.6
        # BERT-large, fused: 4 × 190 MiB at 512 tokens: 64 are 47.5 GiB (29.7 on a card), 128 are 95.
        (141.0, {"model": "bert_large", "seq_length": 512, "kernels": "fused"}, 128),
        (80.0, {"model": "bert_large", "seq_length": 512, "kernels": "fused"}, 64),
        # Plain: 4 × 142 + 16 × 48 = 1,336 MiB each: 64 are 83.5 GiB, 32 are 41.75.
        (141.0, {"model": "bert_large", "seq_length": 512, "kernels": "plain"}, 64),
        (80.0, {"model": "bert_large", "seq_length": 512, "kernels": "plain"}, 32),
    ],
)
def test_default_batch_fits_larger_samples(card_gib, choices, expected):
    assert config_of(machine(gpu(memory_gib=card_gib)), **choices).per_replica_batch_size == expected
