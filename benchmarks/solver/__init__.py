"""Is the solver worth it? Its plans beside rules that need none, at equal budgets."""
