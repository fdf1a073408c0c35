"""The programs that use the buffer: a deep Q-learning agent, its environments, and the records of a run.

Nothing in the core imports this package. gymnasium, ale_py, tqdm, matplotlib, tensorboard and safetensors are imported
only when they are needed; the extra `training` installs them.
"""
