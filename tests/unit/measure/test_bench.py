"""What a bench says of the machine while samples are taken."""

from __future__ import annotations

from flashmoe_science.hardware.probe import POWER_CAP, Telemetry
from flashmoe_science.measure.bench import conditions


def test_what_throttled_a_gpu_on_either_side_is_said_and_a_power_cap_apart() -> None:
    before = Telemetry(sm_clock_mhz=1980, temperature_c=40, power_w=300.0, throttle=("thermal slowdown", POWER_CAP))
    after = Telemetry(sm_clock_mhz=1700, temperature_c=60, power_w=690.0, throttle=("hardware brake",))
    assert conditions(before, after) == {
        "sm_clock_mhz": [1980, 1700],
        "temperature_c": 60,
        "power_w": 690.0,
        "throttle": ["hardware brake", "thermal slowdown"],
        "power_capped": True,
    }
