"""The names that PPO's flags choose among. Imports nothing, so that a misspelt flag is answered at once."""

CRITIC_FREE = ("grpo", "rloo", "reinforce++", "remax")
ESTIMATORS = ("gae", *CRITIC_FREE)
GROUPED = ("grpo", "rloo")  # compare the answers to one prompt, so there must be several
WHITENED = ("gae", "reinforce++")  # the others bring a centre, grpo a scale too
LOSS_ESTIMATORS = ("k1", "k2", "k3", "k3+")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
