import inspect

import pynvml
import pytest
from fake_nvml import GIB, FakeCard, FakeNvml, mig_instance

from tfbench.hardware.gpus import Nvml, handle_of, probe, this_machine, visible_gpus

A = "GPU-aaaa1111-0000-0000-0000-000000000000"
B = "GPU-bbbb2222-0000-0000-0000-000000000000"
C = "GPU-bbbb3333-0000-0000-0000-000000000000"
MIG_1 = "MIG-11111111-0000-0000-0000-000000000000"
MIG_2 = "MIG-22222222-0000-0000-0000-000000000000"


def three_cards() -> FakeNvml:
    return FakeNvml(
        FakeCard(uuid=A, bus_id="00000000:01:00.0"),
        FakeCard(uuid=B, bus_id="00000000:02:00.0"),
        FakeCard(uuid=C, bus_id="00000000:03:00.0"),
    )


def sliced_card(**fields: object) -> FakeCard:
    return FakeCard(uuid=B, mig_on=True, instances={1: mig_instance(MIG_1), 5: mig_instance(MIG_2)}, **fields)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [A, B, C]),
        ("0", [A]),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("1gpu,2", [B, C]),  # read as C's strtoul does
        ("", []),
        ("-1", []),
        ("none", []),
        ("0,2,-1,1", [A, C]),  # the CUDA programming guide's own example
        ("0,3,1", [A]),
        ("3", []),
        ("1,1", []),
        ("0,1,0", []),
        (f"{C},{A}", [C, A]),
        ("GPU-aaaa", [A]),
        ("GPU-bbbb3", [C]),
        ("GPU-bbbb", []),  # two cards start like this
        ("GPU-aaaa,GPU-dddd,GPU-bbbb3", [A]),
        (f"{A},GPU-aaaa", []),  # the same card under two names
        ("0,GPU-bbbb3", [A]),
        (MIG_1, []),
    ],
)
def test_what_cuda_makes_of_visible_devices(variable, expected):
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert [gpu.uuid for gpu in visible_gpus(three_cards(), environ)] == expected


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        (None, ""),
        ("0,1,2", ""),
        ("", "CUDA_VISIBLE_DEVICES= hides all GPUs (installed: 3)"),
        ("0,7,1", "CUDA_VISIBLE_DEVICES=0,7,1: '7' is no GPU here (installed: 3), so CUDA stops there"),
        ("1,1", "CUDA_VISIBLE_DEVICES=1,1 names '1' twice, so CUDA finds no GPU"),
        ("0", "CUDA_VISIBLE_DEVICES=0 hides the others (installed: 3)"),
    ],
)
def test_reason_says_why_gpus_are_missing(variable, words):
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert probe(three_cards(), environ).reason == words


def test_fields_of_a_card():
    card = FakeCard(uuid=A, bus_id="00000000:3B:00.0", memory_total=141 * GIB, capability=(9, 0))
    found = probe(FakeNvml(card), {})
    (gpu,) = found.gpus
    assert (gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.name) == (0, A, "00000000:3B:00.0", "NVIDIA H200")
    assert (gpu.memory_gib, gpu.compute_capability, gpu.is_mig) == (141.0, (9, 0), False)
    assert (found.driver, found.cuda, found.installed, found.reason) == ("580.65.06", "13.0", 1, "")


def test_byte_strings_are_decoded():
    card = FakeCard(name=b"Tesla T4", uuid=A.encode())
    nvml = FakeNvml(card)
    (gpu,) = visible_gpus(nvml, {"CUDA_VISIBLE_DEVICES": "GPU-aaaa"})
    assert (gpu.name, gpu.uuid) == ("Tesla T4", A)


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetName", "name"),
        ("nvmlDeviceGetUUID", "uuid"),
        ("nvmlDeviceGetPciInfo", "pci_bus_id"),
        ("nvmlDeviceGetCudaComputeCapability", "compute_capability"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_Unknown,
        pynvml.NVMLLibraryMismatchError("library is older"),
        UnicodeDecodeError("utf-8", b"\xf8", 0, 1, "invalid start byte"),
    ],
)
def test_a_failing_field_leaves_the_others(function, field, error):
    def fields(card: FakeCard) -> dict[str, object]:
        return vars(visible_gpus(FakeNvml(card), {})[0])

    whole, failed = fields(FakeCard()), fields(FakeCard(failing={function: error}))
    assert failed == {**whole, field: None}
    assert whole[field] is not None


def test_memory_on_a_driver_without_version_2():
    card = FakeCard(
        memory_total=16 * GIB, failing={"nvmlDeviceGetMemoryInfo_v2": pynvml.NVMLError_NotSupported}
    )
    assert visible_gpus(FakeNvml(card), {})[0].memory_gib == 16.0


def test_not_available_is_no_number():
    assert visible_gpus(FakeNvml(FakeCard(memory_total=2**64 - 1)), {})[0].memory_gib is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pynvml.NVMLError_LibraryNotFound, "no NVIDIA driver"),
        (pynvml.NVMLError_DriverNotLoaded, "not loaded"),
        (pynvml.NVMLError_LibRmVersionMismatch, "reboot"),
        (pynvml.NVMLError_NoPermission, "Insufficient Permissions"),
    ],
)
def test_without_driver_no_gpus_but_a_reason(error, words):
    nvml = FakeNvml(FakeCard(), init_error=error, shutdown_error=pynvml.NVMLError_Uninitialized)
    found = probe(nvml, {})
    assert (found.gpus, found.installed, found.driver, found.cuda) == ((), 0, None, None)
    assert words in found.reason
    machine = this_machine(nvml, {})
    assert machine.gpus == ()
    assert machine.reason_without_gpu == found.reason
    assert machine.cpu_cores >= 1
    assert machine.ram_gib > 0.1


def test_driver_without_cards():
    assert probe(FakeNvml(), {}).reason == "the NVIDIA driver finds no GPU"


def test_a_machine_with_gpus_needs_no_reason():
    machine = this_machine(three_cards(), {"CUDA_VISIBLE_DEVICES": "1"})
    assert [gpu.uuid for gpu in machine.gpus] == [B]
    assert machine.reason_without_gpu == ""


def test_a_lost_card_leaves_the_others():
    nvml = FakeNvml(FakeCard(uuid=A, lost_after=0), FakeCard(uuid=B))
    found = probe(nvml, {})
    assert [(gpu.index, gpu.uuid) for gpu in found.gpus] == [(1, B)]
    assert found.reason == "GPU 0 of the driver cannot be opened"


def test_nvml_is_closed_again_and_a_failing_shutdown_is_no_error():
    nvml = three_cards()
    visible_gpus(nvml, {})
    assert nvml.references == 0
    nvml.shutdown_error = pynvml.NVMLError_Unknown
    assert len(visible_gpus(nvml, {})) == 3


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [MIG_1]),
        ("0", [A]),
        ("1", [MIG_1]),
        ("0,1", [MIG_1]),
        (MIG_2, [MIG_2]),
        (f"{MIG_2},{MIG_1}", [MIG_2]),
        ("MIG-2", [MIG_2]),
        ("MIG-3", []),
        (B, [MIG_1]),
    ],
)
def test_mig_gives_one_instance_to_a_process(variable, expected):
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    nvml = FakeNvml(FakeCard(uuid=A), sliced_card(bus_id="00000000:02:00.0"))
    assert [gpu.uuid for gpu in visible_gpus(nvml, environ)] == expected


def test_mig_instance_has_its_own_memory_and_its_card_s_place():
    nvml = FakeNvml(FakeCard(uuid=A), sliced_card(bus_id="00000000:02:00.0", capability=(9, 0)))
    found = probe(nvml, {"CUDA_VISIBLE_DEVICES": f"{MIG_1},{MIG_2}"})
    (gpu,) = found.gpus
    assert (gpu.is_mig, gpu.index, gpu.pci_bus_id) == (True, 1, "00000000:02:00.0")
    assert (gpu.memory_gib, gpu.compute_capability) == (18.0, (9, 0))
    assert "one MIG instance in a process" in found.reason


def test_mig_card_without_instances_is_no_device():
    nvml = FakeNvml(FakeCard(uuid=A, mig_on=True), FakeCard(uuid=B))
    assert [gpu.uuid for gpu in visible_gpus(nvml, {})] == [B]


def test_handles_follow_the_card_not_its_number():
    nvml = three_cards()
    gpus = visible_gpus(nvml, {})
    first, second = nvml.cards[0], nvml.cards[1]
    second.failing["nvmlDeviceGetHandleByUUID"] = pynvml.NVMLError_NotFound
    nvml.cards.reverse()
    with Nvml(nvml) as session:
        assert handle_of(session, gpus[0]) is first
        assert handle_of(session, gpus[1]) is second  # by its PCI bus id


def test_the_real_library_where_there_is_no_driver():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        found = probe(pynvml, {})
        assert found.gpus == ()
        assert found.reason
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has an NVIDIA driver")


def test_the_fake_has_the_signatures_of_the_real_library():
    for name, method in inspect.getmembers(FakeNvml, inspect.isfunction):
        if name.startswith("nvml"):
            ours = list(inspect.signature(method).parameters)[1:]
            assert ours == list(inspect.signature(getattr(pynvml, name)).parameters), name
