"""Runs side by side, the batch search and scaling studies: their decisions, without a process."""

import io
import re
import types

import pytest
from fake_nvml import FakeCard, FakeNvml
from rich.console import Console
from run_helpers import gpu, machine

from tfbench.config import ConfigError
from tfbench.display import Display
from tfbench.hardware import environment, topology
from tfbench.hardware.gpus import visible_gpus
from tfbench.records import RunRecord
from tfbench.sweeping import batch_search, loop, matrix, placement, plan, scaling

BASE = {"model": "resnet_tiny", "gpus": 0}
FOUR_GPUS = [gpu(index=index, uuid=f"GPU-{index}") for index in range(4)]


def points_of(text, *gpus, base=None):
    return matrix.complete_points(base or BASE, matrix.parse_text(text), machine(*gpus))[0]


def configs_of(text, *gpus):
    return [point.config for point in points_of(text, *gpus)]


@pytest.fixture
def cores(monkeypatch):
    """Ten cores, of which the kernel says nothing more."""
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda pid: set(range(1000, 1010)))


@pytest.mark.usefixtures("cores")
class TestPlaces:
    def test_a_run_on_each_gpu_with_cores_of_its_own(self):
        spots = placement.places(configs_of("seed=1,2,3,4,5 gpus=1", *FOUR_GPUS), None, machine(*FOUR_GPUS))
        assert [spot.environment() for spot in spots] == [
            {
                "CUDA_VISIBLE_DEVICES": f"GPU-{index}",
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "TFBENCH_PARALLEL_RUNS": "4",
            }
            for index in range(4)
        ]
        assert [len(spot.cores) for spot in spots] == [2, 3, 2, 3]
        assert frozenset.union(*(spot.cores for spot in spots)) == frozenset(range(1000, 1010))

    @pytest.mark.parametrize(
        ("runs", "gpus", "parallel", "count"),
        [(5, 1, 2, 2), (5, 1, 8, 4), (2, 1, None, 2), (1, 1, None, 1), (5, 0, 3, 3), (5, 0, None, 1)],
    )
    def test_number_of_places(self, runs, gpus, parallel, count):
        seeds = ",".join(map(str, range(runs)))
        configs = configs_of(f"seed={seeds} gpus={gpus}", *FOUR_GPUS)
        assert len(placement.places(configs, parallel, machine(*FOUR_GPUS))) == count

    def test_runs_on_several_gpus_have_the_machine(self):
        configs = configs_of("seed=1,2 gpus=2", *FOUR_GPUS)
        assert placement.places(configs, None, machine(*FOUR_GPUS)) == [placement.Place()]

    def test_a_gpu_without_uuid_goes_by_its_number(self):
        cards = [gpu(index=index, uuid=None) for index in (2, 5)]
        spots = placement.places(configs_of("seed=1,2 gpus=1", *cards), None, machine(*cards))
        assert [spot.gpu for spot in spots] == ["2", "5"]

    def test_kinds_are_brought_together_within_their_round(self):
        points = points_of("seed=1,2 gpus=1,2", *FOUR_GPUS)
        tries = plan.rounds(points, 2)
        work = loop.Sweep(points, tries, machine(*FOUR_GPUS), parallel=None)
        shown = [
            ([each.point.config.gpus for each in batch], len(spots))
            for batch, spots in loop._batches(tries, work)
        ]
        assert shown == [([1, 1], 2), ([2, 2], 1)] * 2

    @pytest.mark.parametrize("text", ["0", "-1", "x", "11", "1.5"])
    def test_refused(self, text):
        with pytest.raises(ConfigError, match=re.escape(f"--parallel={text}: auto (a run on each GPU) or")):
            placement.parse_parallel(text)

    def test_parsed(self):
        assert [placement.parse_parallel(text) for text in ("auto", "1", "10")] == [None, 1, 10]


def test_shares_do_not_split_physical_cores(tmp_path):
    # Two sockets of two cores with two threads each, numbered as Linux does on most servers.
    for cpu, (socket, core) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)] * 2):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert placement.by_physical_core(range(8), tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(("variables", "runs"), [({}, 1), ({"TFBENCH_PARALLEL_RUNS": "3"}, 3)])
def test_a_run_knows_how_many_are_beside_it(variables, runs):
    assert environment.parallel_runs(variables) == runs


class TestNextBatch:
    @pytest.mark.parametrize(
        ("largest", "start", "most", "tries"),
        [
            # Doubling to 256, then 192, 160, 144 and 136 lie between what trains and what does not.
            (150, 32, None, [32, 64, 128, 256, 192, 160, 144, 152]),
            (64, 32, None, [32, 64, 128, 96, 80, 72]),
            (10**9, 32, 100, [32, 64, 100]),
            (20, 64, None, [64, 32, 16, 24]),
            (3, 32, None, [32, 16, 8]),
            (5, 4, None, [4, 8]),
            (17, 10, 17, [10, 17]),
            (16, 10, 17, [10, 17, 16]),
        ],
    )
    def test_tries(self, largest, start, most, tries):
        tried: dict[int, bool] = {}
        while (batch := batch_search.next_batch(tried, start, most)) is not None:
            assert batch not in tried
            tried[batch] = batch <= largest
        assert list(tried) == tries

    def test_an_end_that_is_not_of_memory_is_tried_again(self):
        (point,) = points_of("per_replica_batch_size=32")
        search = batch_search.Search(point, None)

        def row(batch, status):
            return RunRecord(run_key=search.at(batch).config.run_key, status=status)

        rows = [row(32, "ok"), row(64, "failed")]
        assert search.next(rows).config.per_replica_batch_size == 64
        rows += [row(64, "ok"), row(128, "oom"), row(96, "host_oom"), row(80, "oom"), row(72, "oom")]
        assert search.next(rows) is None
        assert search.largest(rows) == 64

    def test_rows_say_what_was_asked_for_and_that_a_search_did_it(self):
        (point,) = points_of("per_replica_batch_size=32 tag=mine")
        config = batch_search.Search(point, None).at(64).config
        assert (config.per_replica_batch_size, config.requested_per_replica_batch_size) == (64, 32)
        assert config.tag == "mine find_max_batch"


class TestScalingStudies:
    @pytest.mark.parametrize(
        ("gpus", "cpu_replicas", "counts"),
        [
            ("auto", 1, [1, 2, 4]),
            ("3", 1, [1, 2, 3]),
            ("8,2", 1, [1, 2, 8]),
            ("0", 2, [1, 2]),
            ("0", 6, [1, 2, 4, 6]),
        ],
    )
    def test_numbers_of_replicas(self, gpus, cpu_replicas, counts):
        assert scaling.replica_counts(gpus, cpu_replicas, machine(*FOUR_GPUS)) == counts

    @pytest.mark.parametrize("gpus", ["1", "auto", "0", "1,x", "0,2"])
    def test_refused(self, gpus):
        with pytest.raises(ConfigError):
            scaling.replica_counts(gpus, 1, machine(gpu()))

    def made(self, mode, batch=64, gpus="1,2,4", **base):
        choices = BASE | {"gpus": gpus, "per_replica_batch_size": batch} | base
        ((study,), _) = scaling.studies(choices, {}, mode, machine(*FOUR_GPUS))
        return [point.config for point in study.points]

    @pytest.mark.parametrize(
        ("mode", "batches", "global_batches"),
        [("weak", [64, 64, 64], [64, 128, 256]), ("strong", [64, 32, 16], [64, 64, 64])],
    )
    def test_what_stays(self, mode, batches, global_batches):
        configs = self.made(mode)
        assert [config.per_replica_batch_size for config in configs] == batches
        assert [config.global_batch_size for config in configs] == global_batches
        assert {config.scaling_mode for config in configs} == {mode}

    def test_all_but_the_baseline_are_diagnosed_unless_the_user_chose(self):
        assert [config.diagnose for config in self.made("weak")] == [False, True, True]
        assert [config.diagnose for config in self.made("weak", diagnose=False)] == [False] * 3

    def test_weak_points_are_plain_runs(self):
        plain = configs_of("gpus=2 per_replica_batch_size=64", *FOUR_GPUS)
        assert self.made("weak")[1].run_key == plain[0].run_key

    def test_a_batch_that_cannot_be_dealt_out_is_named(self):
        with pytest.raises(matrix.ImpossiblePointsError) as refused:
            self.made("strong", batch=30)
        assert f"{refused.value}" == (
            "point replicas=4: --per_replica_batch_size=30: for strong scaling a multiple of 4, to be "
            "dealt out to 4 replicas"
        )

    def test_more_gpus_than_there_are_are_named(self):
        with pytest.raises(matrix.ImpossiblePointsError, match="point replicas=8: --gpus=8: only 4 visible"):
            self.made("weak", gpus="8")

    def test_the_baseline_is_before_and_after_each(self):
        points = points_of("gpus=1,2,4", *FOUR_GPUS)
        order = [(each.point.config.gpus, each.number) for each in plan.around_baseline(points, 2)]
        assert order == [
            (1, 1), (2, 1), (1, 2), (4, 1), (1, 3), (2, 2), (1, 4), (4, 2), (1, 5),
        ]  # fmt: skip


class TestScalingTable:
    POINTS = tuple(points_of("gpus=1,2", *FOUR_GPUS))

    def rows(self, *rates, point=1, width=0.0, **fields):
        key = self.POINTS[point].config.run_key
        return [
            RunRecord(
                run_key=key,
                status="ok",
                samples_per_sec=rate,
                samples_per_sec_low=rate - width,
                samples_per_sec_high=rate + width,
                **fields,
            )
            for rate in rates
        ]

    def line(self, rows):
        return scaling.line(scaling.Study(self.POINTS), self.POINTS[1], rows)

    def test_strong_scaling_has_the_interval_of_both_rates(self):
        choices = BASE | {"gpus": "1,2", "per_replica_batch_size": 64}
        ((study,), _) = scaling.studies(choices, {}, "strong", machine(*FOUR_GPUS))
        one, two = study.points
        rows = [
            RunRecord(
                run_key=point.config.run_key,
                status="ok",
                samples_per_sec=rate,
                samples_per_sec_low=rate / factor,
                samples_per_sec_high=rate * factor,
            )
            for point, rate, factor in ((one, 100.0, 1.03), (two, 160.0, 1.04))
        ]
        # √(ln² 1.03 + ln² 1.04) = 0.04911, a factor of 1.0503 either way.
        assert scaling.line(study, two, rows)[1:5] == ("160.0", "80.0", "80.0 %", "76.2 to 84.0")

    def test_rate_efficiency_and_what_the_row_knows(self):
        seen = {"exposed_communication_ms": 1.25, "gpu_indices": "0,1", "topology": "NV18"}
        line = self.line(self.rows(100.0, point=0, width=0.001) + self.rows(180.0, width=0.001, **seen))
        assert line == ("gpus=2", "180.0", "90.0", "90.0 %", "90.0 to 90.0", "1.25", "0,1", "NV18")

    def test_baselines_are_averaged_and_their_intervals_joined(self):
        # Two baselines, 98 and 102, each ± 2: 100, from 96 to 104. 200 on two GPUs is 100 % of it, and
        # 96.2 (200 / 2 / 104) to 104.2 (200 / 2 / 96), as the other figure has no width of its own.
        line = self.line(self.rows(98.0, 102.0, point=0, width=2.0) + self.rows(200.0))
        assert line[3:5] == ("100.0 %", "96.2 to 104.2")

    def test_rows_count_as_for_a_baseline(self):
        """180 on cards a and b against 100 on a: not 50 beside others, 300 on h, earlier cards' 90."""
        rows = [
            *self.rows(100.0, point=0, gpu_uuids="GPU-a", parallel_runs=1),
            *self.rows(50.0, point=0, gpu_uuids="GPU-a", parallel_runs=2),
            *self.rows(300.0, point=0, gpu_uuids="GPU-h"),
            *self.rows(90.0, gpu_uuids="GPU-c,GPU-d"),
            *self.rows(180.0, gpu_uuids="GPU-a,GPU-b"),
        ]
        assert self.line(rows)[1:4] == ("180.0", "90.0", "90.0 %")

    def test_three_runs_have_the_interval_of_runs(self):
        # 99, 100, 101: standard error 1 / √3, Student's quantile for 2 degrees of freedom 4.3027.
        rate, low, high = scaling.rate_of_runs(self.rows(99.0, 100.0, 101.0))
        assert rate == 100.0
        assert (low, high) == pytest.approx((100 - 4.3027 / 3**0.5, 100 + 4.3027 / 3**0.5), abs=1e-3)

    def test_nothing_is_made_up_for_runs_that_are_missing(self):
        assert self.line([]) == ("gpus=2", *[""] * 7)
        assert self.line(self.rows(200.0))[3:5] == ("", "")

    def test_shown(self):
        file = io.StringIO()
        display = Display(Console(file=file, width=150))
        rows = self.rows(100.0, point=0) + self.rows(180.0)
        scaling.show(scaling.Study(self.POINTS), rows, "weak", display)
        assert "weak scaling" in file.getvalue()
        assert "90.0 %" in file.getvalue()


class LinkedNvml(FakeNvml):
    """Cards with links: (card, link) → what is at its other end; PCIe levels by pair."""

    def __init__(self, *cards, ends=None, levels=None):
        super().__init__(*cards)
        self.ends, self.levels = ends or {}, levels or {}

    def nvmlDeviceGetNvLinkState(self, handle, link):  # noqa: N802
        if (self.cards.index(handle), link) not in self.ends:
            raise self.NVMLError_NotSupported
        return self.NVML_FEATURE_ENABLED

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):  # noqa: N802
        end = self.ends[self.cards.index(handle), link]
        return self.NVML_NVLINK_DEVICE_TYPE_SWITCH if end == "switch" else self.NVML_NVLINK_DEVICE_TYPE_GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):  # noqa: N802
        return types.SimpleNamespace(busId=self.ends[self.cards.index(handle), link].encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):  # noqa: N802
        pair = tuple(sorted((self.cards.index(one), self.cards.index(other))))
        if pair not in self.levels:
            raise self.NVMLError_NotSupported
        return self.levels[pair]


CARDS = [FakeCard(uuid=f"GPU-{n}", bus_id=f"00000000:0{n}:00.0") for n in (1, 2, 3)]
SWITCHED = {(card, link): "switch" for card in range(2) for link in range(18)}
# Two links from the first to the second, one from the first to the third, none from the second to the third.
BRIDGED = {(0, 0): CARDS[1].bus_id, (0, 1): CARDS[1].bus_id, (0, 2): CARDS[2].bus_id}


@pytest.mark.parametrize(
    ("cards", "ends", "levels", "expected"),
    [
        (1, {}, {}, None),
        (2, SWITCHED, {(0, 1): 50}, "NV18"),
        (2, BRIDGED, {}, "NV2"),
        (3, BRIDGED, {(1, 2): 30}, "PHB"),
        (3, {}, {(0, 1): 10, (0, 2): 50, (1, 2): 40}, "SYS"),
        (2, {}, {}, None),
        (3, {}, {(0, 1): 10}, None),
    ],
)
def test_topology_is_the_worst_pairs(cards, ends, levels, expected):
    nvml = LinkedNvml(*CARDS[:cards], ends=ends, levels=levels)
    assert topology.topology(visible_gpus(nvml, {}), nvml) == expected
