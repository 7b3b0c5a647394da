# SLQ on COCO (Karpathy's split) with InternVL3-8B, D = 3584
# paper: COCO R@5 79.7 text to image, 89.1 image to text; 144k parameters, 38.9 GPU hours (Table 3).
# ours: not run yet. 20 x 3584 + 1 = 71,681 parameters
# the paper used H800 GPUs, how many it does not say:
# $ torchrun --standalone --nproc_per_node=8 train.py config/slq_coco_internvl3_8b.py

import os

exec(open(os.path.join(os.path.dirname(__file__), 'slq_coco_internvl3_1b.py')).read())

out_dir = 'out/slq_coco_internvl3_8b'
backbone = 'OpenGVLab/InternVL3-8B-hf'
# App. A: 512 for this one. Prefix cache: 28 layers x 2 x 4 heads x 128 x 2 bytes, 17 MB per image
batch_size = 512
