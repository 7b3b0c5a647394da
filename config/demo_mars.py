# MARS on the demo: a tiny pretrained Qwen2-VL and 3,000 rendered clips, for two CPU cores
# no row of the paper corresponds to this; results and times stand in the README
# $ python data/demo/prepare.py && python train.py config/demo_mars.py

out_dir = 'out/demo_mars'
model = 'mars'
backbone = 'data/demo/backbones/tiny-qwen2-vl'
data = 'data/demo'
frame_cache = 'data/demo/.frames'
num_frames = 8  # as in pretraining: each of a clip's two events gets 4
frame_size = 48  # what the backbone looks at, so frames are resized once, before the cache
num_workers = 1

batch_size = 64  # 6,000 pairs, 2 captions a clip: 93 steps
eval_batch_size = 100
epochs = 1
warmup_epochs = 0.3
# far fewer steps and parameters than in the paper: a higher rate, and with it a lower scale
learning_rate = 4e-3
gamma = 20
lora_r = 16
lora_alpha = 32
lora_dropout = 0  # a quarter of a step's time on a CPU
gradient_checkpointing = False  # time is short here, memory is not

num_slots = 4  # M
lambda_div = 0.1
lambda_hn = 0.05
delta = 0.04
