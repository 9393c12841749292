def test_a_counter_below_zero_was_not_counted() -> None:
    assert Counters({"smsp__inst_executed.sum": -1.0, "sm__inst_executed.sum": 7.0})["instructions"] == 7.0
    assert Counters({"smsp__inst_executed.sum": -1.0})["instructions"] is None
