import dataclasses

import numpy as np
import pytest

from tfbench.measure.gates import EXPLANATIONS, Facts, evaluate

# A run that nothing is wrong with: 100 steps in windows after 10 of warm-up, one of them skipped.
SOUND = Facts(
    weak_scaling_efficiency=1.05,
    strong_scaling_efficiency=0.8,
    mfu=1.0,
    mfu_achievable=1.0,
    precision="mixed_bfloat16",
    measured_steps=100,
    measured_samples=25600,
    global_batch_size=256,
    total_steps=110,
    optimizer_iterations=109,
    steps_skipped=1,
    losses=(7.0, 6.5),
    weights_finite=True,
    weights_changed=True,
    replicas_agree=True,
    retraces_in_windows=0,
    throttle_reasons="",
    other_process_on_gpu=False,
    sm_clock_mhz_mean=1782.0,
    sm_clock_mhz_max=1980.0,
    gpu_util_mean=99.0,
    tensor_active=0.01,
    step_time_difference=0.1,
    ecc_errors=0,
)

# One departure from the sound run and the one gate that it trips.
DEPARTURES = [
    ({"weak_scaling_efficiency": 1.0501}, "efficiency_above_105_percent"),
    ({"strong_scaling_efficiency": 1.2}, "efficiency_above_105_percent"),
    ({"mfu": 1.001}, "mfu_above_1"),
    ({"measured_samples": 25599}, "samples_mismatch"),
    ({"measured_samples": 25600 * 2}, "samples_mismatch"),
    ({"optimizer_iterations": 110}, "steps_mismatch"),
    ({"optimizer_iterations": 218}, "steps_mismatch"),
    ({"optimizer_iterations": 0}, "steps_mismatch"),
    ({"steps_skipped": 3, "optimizer_iterations": 107}, "steps_skipped"),
    ({"losses": (7.0, float("nan"))}, "loss_not_finite"),
    ({"losses": (None, float("inf"))}, "loss_not_finite"),
    ({"weights_finite": False}, "weights_not_finite"),
    ({"weights_finite": np.False_}, "weights_not_finite"),
    ({"weights_changed": False}, "weights_unchanged"),
    ({"replicas_agree": False}, "replicas_differ"),
    ({"retraces_in_windows": 1}, "retrace_in_window"),
    ({"throttle_reasons": "sw_power_cap"}, "throttled"),
    ({"throttle_reasons": "sync_boost|hw_thermal_slowdown"}, "throttled"),
    ({"other_process_on_gpu": True}, "other_process_on_gpu"),
    ({"sm_clock_mhz_mean": 1781.0}, "clocks_below_90_percent"),
    ({"mfu_achievable": 1.001}, "mfu_above_achievable"),
    ({"tensor_active": 0.0099}, "busy_without_tensor_cores"),
    ({"tensor_active": 0.0, "gpu_util_mean": 50.0}, "busy_without_tensor_cores"),
    ({"tensor_active": 0.0, "precision": "mixed_float16"}, "busy_without_tensor_cores"),
    ({"tensor_active": 0.0, "precision": "tf32"}, "busy_without_tensor_cores"),
    ({"step_time_difference": 0.101}, "time_not_linear_in_steps"),
    ({"ecc_errors": 1}, "ecc_errors"),
]


def test_sound_run_trips_nothing():
    assert evaluate(SOUND) == ()


@pytest.mark.parametrize(("departure", "gate"), DEPARTURES)
def test_each_departure_trips_its_gate_alone(departure, gate):
    assert evaluate(dataclasses.replace(SOUND, **departure)) == (gate,)


def test_every_gate_is_tested_and_explained_in_a_sentence():
    assert set(EXPLANATIONS) == {gate for _, gate in DEPARTURES}
    assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in EXPLANATIONS.values())


def test_all_unknown_trips_nothing():
    assert evaluate(Facts()) == ()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Facts)])
def test_an_unknown_fact_among_known_ones_trips_nothing(field):
    assert evaluate(dataclasses.replace(SOUND, **{field: None})) == ()


def test_reasons_that_are_neither_heat_nor_power_are_no_throttling():
    assert evaluate(Facts(throttle_reasons="sync_boost|display_clock_setting")) == ()


@pytest.mark.parametrize("change", [{"gpu_util_mean": 49.9}, {"precision": "fp32"}])
def test_idle_tensor_cores_of_an_idle_gpu_or_in_plain_float32_are_in_order(change):
    assert evaluate(dataclasses.replace(SOUND, tensor_active=0.0, **change)) == ()


def test_losses_may_be_unknown_in_part():
    assert evaluate(Facts(losses=(None, 6.5))) == ()


def test_several_gates_keep_the_order_of_the_table():
    facts = dataclasses.replace(SOUND, weights_finite=False, losses=(float("nan"),), mfu=3.0)
    assert evaluate(facts) == ("mfu_above_1", "loss_not_finite", "weights_not_finite")
