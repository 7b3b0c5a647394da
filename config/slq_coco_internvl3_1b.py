# SLQ on COCO (Karpathy's split) with InternVL3-1B, D = 896
# paper: COCO R@5 74.3 text to image, 84.9 image to text; 36k parameters, 3.9 GPU hours (Table 3).
# ours: not run yet. 20 x 896 + 1 = 17,921 parameters
# the paper used H800 GPUs, how many it does not say:
# $ torchrun --standalone --nproc_per_node=8 train.py config/slq_coco_internvl3_1b.py

out_dir = 'out/slq_coco_internvl3_1b'
model = 'slq'
backbone = 'OpenGVLab/InternVL3-1B-hf'
max_pixels = 448 * 448  # App. A: a fixed 448 x 448, one tile of 256 tokens
data = 'data/coco'
num_frames = 1  # an image is a video of one frame

# App. A: global batch 1024, all of it in one loss. The prefix cache of an image of 300 tokens is
# 24 layers x 2 x 2 heads x 64 x 2 bytes = 3.7 MB, so that 1024 pairs fit one GPU
batch_size = 1024
epochs = 5  # Sec. 5
warmup_epochs = 0.03 * 5  # App. A: warmup ratio 0.03, then cosine
# Choice: Table 7, the rate per backbone, is not in the text we have; this is the authors' code
learning_rate = 1e-5

num_queries = 20  # N
tau = 0.07
