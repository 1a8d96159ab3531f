"""`foray sft`: demonstrations as token ids, with the code that runs the episodes; training is `learner.sft`."""
