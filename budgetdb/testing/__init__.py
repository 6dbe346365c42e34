"""Contract checks for authors of plugins: each runs one implementation through every promise of its `base.py`.

Call them from a test of the package that provides the plugin; nothing is needed but budgetdb itself::

    from budgetdb.testing.costs import check_cost_model


    def test_it_keeps_the_contract() -> None:
        check_cost_model(RingCost)

`budgetdb.testing.devices.check_device` and `budgetdb.testing.workloads.check_workload` do the same for the other two.
A broken promise is a `budgetdb.testing.contract.ContractError`, whose message says which one, and at what values.
"""
