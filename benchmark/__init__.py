"""`lockstep-bench`: measurements, the limits of hardware, plans, and fleets in virtual time."""
