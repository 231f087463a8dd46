"""What RLHF is: models with a score head, losses, advantages, experience, metrics, and the command line."""
