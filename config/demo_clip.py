# fine-tuned CLIP on the demo, frames averaged: CLIP4Clip's baseline (meanP), for demo_pha.py
# $ python data/demo/prepare.py && python train.py config/demo_clip.py
# zero-shot, before training: --epochs=0

import os

exec(open(os.path.join(os.path.dirname(__file__), 'demo_pha.py')).read())

out_dir = 'out/demo_clip'
levels = 'mean'
# as many tries as demo_pha.py had, SumR on val: 500.8, and with
#   learning_rate 2e-3   494.2    sigma 0.2   490.5    weight_decay 0.2   500.0
# at sigma 0.05: 3e-4 489.2, 9e-4 492.5, 3e-3 488.0, 1e-3 over 2 epochs 489.8; at 0.02: 3e-4 485.5
learning_rate = 1e-3
clip_lr_scale = 1
sigma = 0.1
