# the final-layer single-vector baseline on the demo: Table 2, row 1 of the MARS paper
# everything as in demo_mars.py but for what makes MARS: slots, layer fusion, the two extra losses
# $ python data/demo/prepare.py && python train.py config/demo_baseline.py

import os

exec(open(os.path.join(os.path.dirname(__file__), 'demo_mars.py')).read())

out_dir = 'out/demo_baseline'
num_slots = 1
layer_fusion = False
lambda_div = 0
lambda_hn = 0
