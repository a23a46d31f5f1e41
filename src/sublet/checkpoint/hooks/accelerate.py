"""accelerate: everything an Accelerator has prepared, as one state. Rule: live objects only, nothing is copied here.

state = state_of(accelerator)
done = ckpt.load(state)
…
ckpt.step(step, state)
"""

from typing import Any


def state_of(accelerator: Any, **more: Any) -> dict[str, Any]:
    """Models, optimizers, schedulers, the gradient scaler and what was registered for checkpointing;
    `more` as it is.
    """
    state: dict[str, Any] = {
        "models": [accelerator.unwrap_model(model) for model in accelerator._models],
        "optimizers": [optimizer.optimizer for optimizer in accelerator._optimizers],
        "schedulers": list(accelerator._schedulers),
        "registered": list(accelerator._custom_objects),
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state | more
