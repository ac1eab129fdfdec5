#!/usr/bin/env bash
# A file of prompts that decode together; run again, it goes on where it was interrupted.
set -euo pipefail
printf '%s\n' '{"id": "sky", "prompt": "Why is the sky blue?"}' '{"id": "sea", "prompt": "Why is the sea salty?"}' >prompts.jsonl
llminfer generate --prompts prompts.jsonl --output answers.jsonl --resume -n 12 -t 0
# and branch on whether a longer context would fit this machine
if llminfer kv-size smollm2-135m --tokens 8k --batch 16 --memory 2GiB --bytes >/dev/null 2>&1; then
  echo "16 sequences of 8000 tokens fit in 2 GiB"
else
  echo "16 sequences of 8000 tokens do not fit in 2 GiB"
fi
