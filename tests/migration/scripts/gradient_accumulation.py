"""Accumulate micro-batches, and reduce with the last one only.

torchrun --nproc-per-node 2 gradient_accumulation.py
"""

import torch
from tiny import Results, Transformer, batches, launch, next_token_loss, read_gradients, read_state
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

NUM_MICRO_BATCHES = 3


def main(device: torch.device) -> Results:
    model = Transformer().to(device)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert isinstance(model, FSDPModule)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses, without_sync, gradients = [], [], {}
    for step in range(2):
        # The second step keeps full parameters between its micro-batches as well.
        keep_gathered = step == 1
        for index, tokens in enumerate(batches(NUM_MICRO_BATCHES, device)):
            last = index == NUM_MICRO_BATCHES - 1
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or not keep_gathered)
            loss = next_token_loss(model, tokens) / NUM_MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
            if not last and not keep_gathered:
                without_sync.append(sum(p.grad is not None for p in model.parameters()))
        gradients = read_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    # The sum over ranks instead of their mean, for a loss that is divided by all tokens elsewhere.
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
    next_token_loss(model, next(batches(1, device))).backward()
    return {
        "losses": losses,
        "sharded_gradients_without_sync": without_sync,
        "accumulated": gradients,
        "summed": read_gradients(model),
        "model": read_state(model),
    }


if __name__ == "__main__":
    launch(main)
