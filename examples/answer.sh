#!/usr/bin/env bash
# One answer into a variable, its cost from a document, and a branch on why it ended.
set -euo pipefail
answer=$(llminfer generate --quiet -n 16 -t 0 "Name one primary colour.")
echo "answer: $answer"
llminfer generate --json -n 4 -t 0 "Count to ten." >run.json
python3 - <<'PYTHON'
import json
run = json.load(open("run.json"))
print("reason:", run["finish_reason"], "· KV bytes:", run["kv_cache"]["measured_bytes"])
PYTHON
