"""The planners' inputs: hardware, profiles, a machine's measured rates, pipeline schedules."""
