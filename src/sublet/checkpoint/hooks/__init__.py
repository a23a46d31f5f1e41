"""The library where a framework owns the loop: one adapter a framework, imported only by those who have it.

sublet.checkpoint.hooks.transformers   a callback for Trainer, with resume       run on the real framework in the tests
sublet.checkpoint.hooks.lightning      a CheckpointIO and a callback             likewise
sublet.checkpoint.hooks.accelerate     the state of an Accelerator               likewise
sublet.checkpoint.hooks.dcp            a storage writer and reader               likewise
sublet.checkpoint.hooks.megatron       save_checkpoint and load_checkpoint       on modules of the same shape
sublet.checkpoint.hooks.autockpt       the names of EasyCkpt and AutoCkpt        likewise
sublet.checkpoint.hooks.deepspeed      a checkpoint engine                       likewise; in DeepSpeed by a script
"""
