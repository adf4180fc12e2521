import pytest

from tfbench.hardware import references, specs

RESNET = ("resnet50_v1.5_train", "resnet50_train", "resnet50_v1.5_mlperf")
BERT = (
    "bert_large_ph1_seq128",
    "bert_large_ph2_seq512",
    "bert_large_squad_seq384",
    "bert_large_mlperf_packed",
)


def test_every_row_parses():
    rows = references.load()
    assert len(rows) == 55
    cards = {spec.gpu for spec in specs.load()}
    for row in rows:
        assert row.card in cards
        assert row.precision_class in {"fp32", "tf32", "mixed_float16", "fp8"}
        assert row.metric == ("img/s" if row.workload.startswith("resnet") else "seq/s")
        assert row.total / row.n_gpu == pytest.approx(row.per_gpu, rel=0.01)
        assert row.data in {"real", "synthetic"}
        assert not row.source.startswith("same")
        assert len(row.source) > 20


@pytest.mark.parametrize(
    ("batch", "micro_batch"), [("256", 256), ("48x2", 48), ("5 (accum 11)", 5), ("", None)]
)
def test_micro_batch_sizes(batch, micro_batch):
    rows = [row for row in references.load() if row.batch_per_gpu == batch]
    assert {row.micro_batch_size for row in rows} == {micro_batch}


def test_a_source_said_once_is_on_every_row():
    (row,) = [r for r in references.load() if r.total == 649.69]
    assert row.source == "DLE TensorFlow2/LanguageModeling/BERT/README.md (749.73 in its multi-node table)"


@pytest.mark.parametrize(
    ("workloads", "gpu", "precision", "num_gpus", "seq_length", "batch", "per_gpu", "differences"),
    [
        # H200: the TensorFlow results are on older cards; of those on the same card the fastest comes first,
        # also where a slower one's batch is nearer.
        (
            RESNET, "NVIDIA H200", "mixed_float16", 1, None, 256, 4868.3,
            ["PyTorch channels_last, not TensorFlow", "workload resnet50_train"],
        ),
        (
            RESNET, "NVIDIA H200", "mixed_float16", 1, None, 2048, 4868.3,
            ["PyTorch channels_last, not TensorFlow", "batch 256 per GPU", "workload resnet50_train"],
        ),
        (
            RESNET, "NVIDIA H200", "tf32", 1, None, None, 2259,
            ["PyTorch 24.03 NCHW, not TensorFlow", "workload resnet50_train"],
        ),
        # The workload named first wins over the faster MLPerf entry on the same eight cards.
        (
            RESNET, "NVIDIA H200", "mixed_float16", 8, None, None, 3060,
            ["PyTorch 24.03 NCHW, not TensorFlow", "workload resnet50_train"],
        ),
        # TensorFlow wins over the faster DeepSpeed on the same card.
        (BERT, "Tesla V100-SXM2-32GB", "mixed_float16", 1, 128, None, 206.5, ["real data"]),
        # Two GPUs: one is nearer than eight.
        (
            RESNET, "NVIDIA A100-SXM4-40GB", "mixed_float16", 2, None, 256, 2375,
            ["an older TensorFlow: TF1+XLA 20.06", "1 GPU", "real data"],
        ),
        (
            RESNET, "NVIDIA A100-SXM4-40GB", "mixed_float16", 8, None, 128, 2175,
            ["an older TensorFlow: TF1+XLA 20.06", "batch 256 per GPU", "real data"],
        ),
        (
            RESNET, "Tesla V100-SXM2-16GB", "fp32", 1, None, 128, 412,
            ["an older TensorFlow: TF1+XLA 20.06", "real data"],
        ),
        # No result on the card: the one with the nearest peak (L4 121, V100 125 TFLOP/s).
        (
            RESNET, "NVIDIA L4", "mixed_float16", 1, None, 256, 1270,
            ["another card: V100-16GB", "an older TensorFlow: TF1+XLA 20.06", "real data"],
        ),
        # bfloat16 stands beside float16, and it says so.
        (
            BERT, "NVIDIA A100-SXM4-80GB", "mixed_bfloat16", 1, 128, None, 485.59,
            ["another precision: amp", "real data"],
        ),
        (BERT, "NVIDIA A100-SXM4-80GB", "tf32", 1, 128, None, 282.98, ["real data"]),
        # Phase 1 is the first workload named, so phase 2 is another.
        (
            BERT, "NVIDIA A100-SXM4-80GB", "mixed_float16", 4, 512, 40, 81.2,
            ["8 GPUs, per GPU", "real data", "workload bert_large_ph2_seq512"],
        ),
        (
            BERT, "NVIDIA H200", "mixed_float16", 1, 128, None, 485.59,
            ["another card: A100-80GB", "real data"],
        ),
    ],
)  # fmt: skip
def test_nearest_is_what_a_person_would_pick(
    workloads, gpu, precision, num_gpus, seq_length, batch, per_gpu, differences
):
    found, words = references.nearest(
        workloads, gpu, precision, num_gpus, seq_length, per_replica_batch_size=batch
    )
    assert found.per_gpu == per_gpu
    assert words == differences


def test_real_data_is_a_difference_only_to_synthetic():
    run = (BERT, "NVIDIA A100-SXM4-80GB", "mixed_float16", 1, 128)
    assert references.nearest(*run)[1] == ["real data"]
    assert references.nearest(*run, data="pydoc")[1] == []


@pytest.mark.parametrize(
    ("workloads", "num_gpus", "seq_length"),
    [
        (BERT, 1, 256),  # another length is another workload
        (BERT[:3], 1, None),
        (("bert_large_mlperf_packed",), 8, 512),  # packed sequences have no one length
        (RESNET, 0, None),  # on the CPU
        ((), 1, None),
        (("vit",), 1, None),
    ],
)
def test_nothing_comparable(workloads, num_gpus, seq_length):
    assert references.nearest(workloads, "NVIDIA H200", "mixed_float16", num_gpus, seq_length) is None


@pytest.mark.parametrize("gpu", [None, "NVIDIA RTX 9999"])
def test_an_unknown_card_is_always_another_card(gpu):
    _, words = references.nearest(RESNET, gpu, "mixed_float16", 1, None)
    assert words[0].startswith("another card: ")
