# SLQ on COCO (Karpathy's split) with Qwen3-VL-4B, D = 2560
# paper: COCO R@5 75.2 text to image, 85.6 image to text; 106K parameters, 13.5 GPU hours (Table 3).
# ours: not run yet. 20 x 2560 + 1 = 51,201 parameters
# the paper used H800 GPUs, how many it does not say:
# $ torchrun --standalone --nproc_per_node=8 train.py config/slq_coco_qwen3vl_4b.py

import os

exec(open(os.path.join(os.path.dirname(__file__), 'slq_coco_qwen3vl_2b.py')).read())

out_dir = 'out/slq_coco_qwen3vl_4b'
backbone = 'Qwen/Qwen3-VL-4B-Instruct'
