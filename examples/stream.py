"""Stream an answer and print what each token cost."""

import sys

from llminfer import Finished, SamplingParams, Step, StopCriteria, generate, load

model = load()
prompt = " ".join(sys.argv[1:]) or "Why is the sky blue?"
for event in generate(
    model, prompt, sampling=SamplingParams(temperature=0), stop=StopCriteria(max_new_tokens=24, stop=("\n",))
):
    match event:
        case Step():
            print(f"{event.forward_s * 1e3:7.1f} ms  {event.kv_bytes:>9} B  {event.text!r}")
        case Finished():
            print(f"ended: {event.reason}")
