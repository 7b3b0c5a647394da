# SLQ on COCO (Karpathy's split) with Qwen3-VL-2B, D = 2048
# paper: COCO R@5 75.7 text to image, 84.4 image to text; 83K parameters, 6.7 GPU hours (Table 3).
# ours: not run yet. 20 x 2048 + 1 = 40,961 parameters
# the paper used H800 GPUs, how many it does not say:
# $ torchrun --standalone --nproc_per_node=8 train.py config/slq_coco_qwen3vl_2b.py

import os

exec(open(os.path.join(os.path.dirname(__file__), 'slq_coco_internvl3_1b.py')).read())

out_dir = 'out/slq_coco_qwen3vl_2b'
backbone = 'Qwen/Qwen3-VL-2B-Instruct'
max_pixels = 0  # App. A: the image's own aspect ratio, the backbone's own limit
# Choice: as above, the authors' script for Qwen
learning_rate = 5e-4
