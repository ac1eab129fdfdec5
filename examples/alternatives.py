"""The five most likely tokens at every step of a greedy answer."""

import math

from llminfer import Step, StopCriteria, generate, load

model = load()
sampling = {"temperature": 0, "logprobs": 5}
for event in generate(
    model, "The capital of France is", raw=True, sampling=sampling, stop=StopCriteria(max_new_tokens=4)
):
    if isinstance(event, Step):
        likely = (f"{model.tokenizer.decode([id_])!r} {math.exp(logprob):.1%}" for id_, logprob in event.top_logprobs)
        print(f"{event.token_text!r:>12}: {', '.join(likely)}")
