"""The learner: reads trajectory groups, trains the policy, publishes its weights."""
