"""The programs that use the buffer: a deep Q-learning agent, its environments, and the records of a run.

Nothing in the core imports this package, and nothing here imports gymnasium, ale_py, tqdm, matplotlib, tensorboard or
safetensors before it is used: the extra `training` brings them.
"""
