"""Train step `classify`: for stages with labels, of a model with several heads."""

from torch.nn import functional as F

from phaseloop import Task, register_train_step


@register_train_step("classify", whole_model_forward=True)
def classify(task: Task) -> None:
    """Cross-entropy of the model's logits, whatever loss the other stages of the run have.

    The model is called as `model(input, output="logits")`, targets are classes, int64 [B].
    """
    batch = task.next_batch()
    logits = task.forward(batch.input, output="logits")
    loss = F.cross_entropy(logits.float(), batch.target)
    task.measure(loss, logits, batch.target)
    if task.train:
        task.backward(loss)
        task.update()
