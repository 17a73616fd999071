"""Steps run backward in the reverse order, also those that no tensor goes through."""

from __future__ import annotations

import torch

from polyattn.distributed.steps import Steps


def test_each_step_hangs_on_the_one_before_it() -> None:
    order: list[str] = []
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    held: list[torch.Tensor] = []

    def taken(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held.extend(tensor * 3 for tensor in tensors)
        return ()

    def given() -> tuple[torch.Tensor, ...]:
        return tuple(held)

    def back(name: str, *answer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        order.append(name)
        return answer

    gradients: list[torch.Tensor] = []

    def gradients_taken(*grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients.extend(grads)
        return back("given")

    steps = Steps(grad=True)
    steps.take(taken, lambda: back("taken", *(3 * grad for grad in gradients)), x, y)
    steps.take(lambda: (), lambda: back("between"))
    a, b = steps.take(given, gradients_taken)
    (a + 2 * b).sum().backward()
    assert order == ["given", "between", "taken"]
    assert x.grad is not None
    assert y.grad is not None
    assert (x.grad.tolist(), y.grad.tolist()) == ([3.0, 3.0], [6.0, 6.0])


def test_without_gradients_a_step_is_its_forward() -> None:
    x = torch.ones(2, requires_grad=True)
    (out,) = Steps(grad=False).take(lambda tensor: (tensor.detach() + 1,), lambda grad: (grad,), x)
    assert out.grad_fn is None
    assert out.tolist() == [2.0, 2.0]
