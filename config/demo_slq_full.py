# the LLM fine-tuned in full, embedding from the last token: Table 3's third row
# everything as in demo_slq.py but for the tuning, its rate and its prompts
# $ python data/demo/prepare.py && python train.py config/demo_slq_full.py

import os

exec(open(os.path.join(os.path.dirname(__file__), 'demo_slq.py')).read())

out_dir = 'out/demo_slq_full'
tuning = 'full'
extraction = 'last'
# SumR on val: 587.2; with the prompts of demo_slq.py 567.0, and 542.8 at 1e-3
learning_rate = 3e-3
video_prompt = '<video>\nSummarize above video in one word:'
text_prompt = '{caption}\nSummarize above sentence in one word:'
