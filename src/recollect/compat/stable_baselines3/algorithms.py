"""DQN, SAC and TD3 that learn from prioritised replay: weighted critic losses, TD errors as new priorities."""
PrioritizedDQN = PrioritizedSAC = PrioritizedTD3 = None
