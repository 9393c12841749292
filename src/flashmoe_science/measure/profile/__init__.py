"""Where the time of a call goes: hardware counters of its launches, what the machine reaches, another tool's clock."""
