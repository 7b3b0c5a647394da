"""
What the papers' models compute, counted from their shapes; bench_flops.py prints it as tables.

A piece of work is a Counter {kind: amount}: multiply-adds (MACs), sorted by which counters can see
them, and elements of LayerNorms. A rule weighs the kinds; count(work, rule) is the number a paper
prints, or with rule 'flops' the honest one. Nothing here is fitted to an answer: a recipe is made
of layers, widths and tokens as the models' configs have them.

Shapes: n tokens, d width, L tokens of a text, N videos in the gallery, M slots, T frames.
Not counted by any rule: softmax, activations, RMSNorm, rotary angles, embeddings, biases, sorting.
"""
import math
from collections import Counter

# What one unit of each kind counts for. Kinds:
#   linear   an nn.Linear called as a module    conv    a convolution
#   hidden   weights that are no module of their own: in nn.MultiheadAttention, x @ parameter
#   matmul   products of activations: attention written out, similarities
#   fused    attention inside a fused kernel (flash attention)
#   merging  ToMe's comparison of tokens, run when features are stored, outside the profiled forward
#   norm     elements that nn.LayerNorm goes over (not MACs; CLIP's own LayerNorm class isn't seen)
RULES = {
    # MARS, Table 4: fvcore.nn.FlopCountAnalysis
    'fvcore': dict(linear=1, conv=1, hidden=1, matmul=1, fused=0, merging=0, norm=5),
    # the same, blind to nothing
    'fvcore+': dict(linear=1, conv=1, hidden=1, matmul=1, fused=1, merging=1, norm=5),
    # PHA-Net, Tables 4, 7, 10, 12: thop 0.1.1
    'thop': dict(linear=1, conv=1, hidden=0, matmul=0, fused=0, merging=0, norm=4),
    # ours, for all rows alike: a multiply-add is two FLOPs, and all of them are counted
    'flops': dict(linear=2, conv=2, hidden=2, matmul=2, fused=2, merging=2, norm=0),
}


def count(work, rule):
    """
    The number that `rule` gives for `work`: a weighted sum over the kinds above. fvcore: one
    multiply-add is 1, LayerNorm 5 per element, fused attention is not seen. thop: one multiply-add
    of nn.Linear and nn.Conv modules is 1, nn.LayerNorm 4 per element, all else is not seen. flops:
    2 per multiply-add, attention counted everywhere, whatever the kernel.
    """
    return sum(RULES[rule][kind] * amount for kind, amount in work.items())


def times(k, work):
    return Counter({kind: k * amount for kind, amount in work.items()})


def total(*works):
    return sum(works, Counter())


# -----------------------------------------------------------------------------
# pieces

def linear(n, a, b, kind='linear'):
    return Counter({kind: n * a * b})  # [n, a] @ [a, b]


def norm(n, d):
    return Counter(norm=n * d)


def attend(n, keys, d, kind='matmul'):
    # q @ k.T and weights @ v over all heads, the whole square also where a mask is causal
    return Counter({kind: 2 * n * keys * d})


def block(n, d, mlp, attention='matmul', weights='linear', norms=2):
    """A transformer layer on n tokens: q, k, v, o of d x d, attention, an MLP d -> mlp -> d."""
    return total(linear(n, d, 4 * d, weights), attend(n, n, d, attention),
                 linear(n, d, 2 * mlp), norm(norms * n, d))


def low_rank(n, shapes, r):
    """LoRA beside linears of `shapes` [(in, out)], not merged: in -> r -> out."""
    return Counter(linear=n * r * sum(a + b for a, b in shapes))


# -----------------------------------------------------------------------------
# vision towers

# clip: frames that attend to each other, 0 = all of a video; cls: class tokens of a clip
UMT_L = dict(layers=24, d=1024, mlp=4096, patch=16, side=224, clip=0, cls=0, norms=2)
TOWERS = {
    'UMT': UMT_L,
    # RMSNorm, which no counter sees. The attention pool behind it is not in the paper's number
    'InternVideo2-1B': dict(layers=40, d=1408, mlp=6144, patch=14, side=224, clip=0, cls=1,
                            norms=0),
    'InternVideo2-6B': dict(layers=48, d=3200, mlp=12800, patch=14, side=224, clip=0, cls=1,
                            norms=0),
    # VideoChat-Flash's UMT-L at 448 pixels, clips of 4 frames. Its features are read before the
    # last of 24 layers, so 23 run; attention is a flash kernel
    'MARS': UMT_L | dict(layers=23, side=448, clip=4, attention='fused'),
    # SLQ's InternVL3: InternViT-300M on one tile of 448 pixels
    'InternViT': dict(layers=24, d=1024, mlp=4096, patch=14, side=448, clip=1, cls=1, norms=2),
    # SLQ's Qwen3-VL-2B and -4B; square pictures here, the model itself keeps their aspect. A patch
    # is of two frames, an image is shown twice
    'Qwen3-VL': dict(layers=24, d=1024, mlp=4096, patch=16, side=448, clip=1, cls=0, norms=2,
                     tubelet=2),
}


def patches(tower):
    return (tower['side'] // tower['patch']) ** 2  # of a frame


def num_clips(tower, T):
    return math.ceil(T / tower['clip']) if tower['clip'] else 1  # the last one is filled up


def vision_tokens(tower, T):
    """Tokens of a clip (of the whole video, where all frames attend to each other)."""
    return (tower['clip'] or T) * patches(tower) + tower['cls']


def vision(tower, T):
    """T frames through a tower: patches by a convolution, blocks, a final norm."""
    n, d = vision_tokens(tower, T), tower['d']
    layer = block(n, d, tower['mlp'], tower.get('attention', 'matmul'), norms=tower['norms'])
    pixels = 3 * tower.get('tubelet', 1) * tower['patch'] ** 2
    conv = Counter(conv=(n - tower['cls']) * pixels * d)
    final = norm(n if tower['norms'] else 0, d)
    return times(num_clips(tower, T), total(conv, times(tower['layers'], layer), final))


# -----------------------------------------------------------------------------
# MARS, Table 4: the baselines. A video encoder, BERT-large over the text, and BERT's last layers
# again for each of the k best videos, with cross attention to all tokens of the video

GALLERY = {'DiDeMo': 1003, 'ActivityNet': 4917, 'LSMDC': 1000, 'MSR-VTT': 1000}  # test videos, and
#                                                   as many queries: text to video only (Table A1)
BERT_TOKENS = {'DiDeMo': 64, 'ActivityNet': 150, 'LSMDC': 96, 'MSR-VTT': 32}  # max_txt_l, padded to
K_TEST = 128  # videos that are ranked again
BERT = dict(d=1024, mlp=4096, text_layers=19, fusion_layers=5)

# frames: what the paper's number has. official: what the models' own fine-tuning configs have; for
# InternVideo2-1B there is none in their repository, a public fine-tuning kit has 8 (theirs for
# zero-shot runs have 4). width: of the video tokens that the text attends to. embed: of the first,
# cheap similarity
BASELINES = {
    'UMT': dict(frames=4, official=12, width=1024, embed=768),
    'InternVideo2-1B': dict(frames=8, official=8, width=1408, embed=512),
    # its video tokens are projected to 768, hence less cross attention than in the 1B
    'InternVideo2-6B': dict(frames=8, official=4, width=768, embed=768, project=768),
}


def baseline_video(name, T):
    model, tower = BASELINES[name], TOWERS[name]
    n = vision_tokens(tower, T)
    work = vision(tower, T)
    if 'project' in model:
        work += linear(n, tower['d'], model['project']) + norm(n, model['project'])
    return work


def baseline_query(name, T, L, N, k=K_TEST):
    """One text against N videos: encoded once, dotted with all, fused with the k best."""
    d, mlp, model = BERT['d'], BERT['mlp'], BASELINES[name]
    n = vision_tokens(TOWERS[name], T)
    layer = block(L, d, mlp)
    text = total(norm(L, d), times(BERT['text_layers'], layer), linear(1, d, model['embed']))
    cross = total(linear(L, d, 2 * d),                      # q and o, of the text
                  linear(n, model['width'], 2 * d),         # k and v, of the video
                  attend(L, n, d), norm(L, d))
    fusion = total(times(BERT['fusion_layers'], layer + cross), linear(1, d, 2))  # match or not
    return total(text, Counter(matmul=N * model['embed']), times(k, fusion))


# -----------------------------------------------------------------------------
# decoder LLMs

# head: width of a head; kv: heads of keys and values
LLMS = {
    'Qwen2-7B': dict(layers=28, d=3584, heads=28, kv=4, head=128, mlp=18944, vocab=152064),
    'Qwen2-1.5B': dict(layers=28, d=1536, heads=12, kv=2, head=128, mlp=8960, vocab=151936,
                       tied=True),
    'InternVL3-1B': dict(layers=24, d=896, heads=14, kv=2, head=64, mlp=4864, vocab=151674),
    'InternVL3-8B': dict(layers=28, d=3584, heads=28, kv=4, head=128, mlp=18944, vocab=151674),
    'Qwen3VL-2B': dict(layers=28, d=2048, heads=16, kv=8, head=128, mlp=6144, vocab=151936,
                       tied=True, qk_norm=True),
    'Qwen3VL-4B': dict(layers=36, d=2560, heads=32, kv=8, head=128, mlp=9728, vocab=151936,
                       tied=True, qk_norm=True),
}


def llm_linears(llm):
    """(in, out) of the seven linears of a layer: q, k, v, o, gate, up, down."""
    d, q, kv, mlp = llm['d'], llm['heads'] * llm['head'], llm['kv'] * llm['head'], llm['mlp']
    return [(d, q), (d, kv), (d, kv), (q, d), (d, mlp), (d, mlp), (mlp, d)]


def llm_pass(llm, n, keys=None, r=0, layers=None):
    """n tokens through the decoder layers, attending to `keys` (n itself if None). No lm_head."""
    shapes = llm_linears(llm)
    layer = total(*(linear(n, a, b) for a, b in shapes), low_rank(n, shapes, r),
                  attend(n, n if keys is None else keys, llm['heads'] * llm['head']))
    return times(llm['layers'] if layers is None else layers, layer)


# -----------------------------------------------------------------------------
# MARS

MARS = dict(llm='Qwen2-7B', frames=16, slots=4, r=128, tokens=64)  # tokens: of a clip, after ToMe
# of a prompt, slots included. 291 = 256 of the video + 31 of the template + 4 slots
MARS_TOKENS = {'DiDeMo': 47, 'ActivityNet': 150, 'LSMDC': 96, 'MSR-VTT': 40}
MARS_SLOTS = {'DiDeMo': 4, 'ActivityNet': 4, 'LSMDC': 4, 'MSR-VTT': 3}  # Table A2
MARS_TEMPLATE = 31
QUERY_TOKENS = 43  # a plan's: DiDeMo's 47 without its 4 slots


def tome(n, target, d=64):
    """Merging n tokens: each step compares the even with the odd ones, in the mean head's width."""
    macs = 0
    while n > target:
        macs += math.ceil(n / 2) * (n // 2) * d
        n -= min(n // 2, n - target)
    return Counter(merging=macs)


def fuse(llm, M):
    return Counter(matmul=M * llm['layers'] * llm['d'])  # Eq. 2: [M, layers] with [layers, M, d]


def mars_video(T=16, side=448, M=4, tokens=64, r=128, template=MARS_TEMPLATE):
    """T frames -> tower -> ToMe -> MLP with LoRA -> LLM with LoRA -> M slots."""
    llm, tower = LLMS[MARS['llm']], TOWERS['MARS'] | dict(side=side)
    clips, C, d = num_clips(tower, T), tower['d'], llm['d']
    mlp = [(C, d), (d, d)]
    n = clips * tokens
    project = total(*(linear(n, a, b) for a, b in mlp), low_rank(n, mlp, r))
    return total(vision(tower, T), times(clips, tome(vision_tokens(tower, T), tokens)), project,
                 llm_pass(llm, n + template + M, r=r), fuse(llm, M))


def mars_query(L, N, M=4, r=128):
    """A text of L tokens in all through the LLM, then N * M cosines."""
    llm = LLMS[MARS['llm']]
    return total(llm_pass(llm, L, r=r), fuse(llm, M), Counter(matmul=N * M * llm['d']))


# -----------------------------------------------------------------------------
# PHA-Net and its peers on CLIP ViT-B/32. Attention is nn.MultiheadAttention in all of their towers

D = 512                                                  # width of text, projection and heads
B32 = dict(layers=12, d=768, mlp=3072, patch=32, side=224)
BATCH = 64       # texts x videos of a profiled batch: an item has a part in 64 pairs of it
WORDS, FRAMES = 32, 12


def clip_block(n, d):
    return block(n, d, 4 * d, 'fused', 'hidden', norms=0)


def clip_text(words):
    return total(times(12, clip_block(words, D)), linear(words, D, D, 'hidden'))


def clip_frames(T, projected=50, side=224):
    """T frames; the peers' code projects all 50 tokens of a frame and keeps the first."""
    d, n = B32['d'], (side // B32['patch']) ** 2
    one = total(Counter(conv=n * 3 * B32['patch'] ** 2 * d), times(12, clip_block(n + 1, d)),
                linear(min(projected, n + 1), d, D, 'hidden'))
    return times(T, one)


def frame_transformer(T):
    return times(4, clip_block(T, D))                    # CLIP4Clip's seqTransf


def token_weights(n):
    return linear(n, D, 2 * D) + linear(n, 2 * D, 1)     # HBI's and PHA-Net's MLP 512 - 1024 - 1


def pairs(k):
    return Counter(matmul=BATCH * k * D)                 # k products of width 512 for each pair


def clip4clip():
    return dict(text=clip_text(WORDS), video=clip_frames(FRAMES) + frame_transformer(FRAMES),
                pairs=pairs(1))


def xclip():
    # sentence and word features go through a matrix, then sentence and words x video and frames
    peer = clip4clip()
    peer['text'] += linear(1 + WORDS, D, D, 'hidden')
    return peer | dict(pairs=pairs((1 + WORDS) * (1 + FRAMES)))


def drl():
    # token weights by 512 - 512 - 1 on either side, then words x frames
    peer = clip4clip()
    for side, n in (('text', WORDS), ('video', FRAMES)):
        peer[side] += linear(n, D, D) + linear(n, D, 1)
    return peer | dict(pairs=pairs(WORDS * FRAMES))


def ucofia():
    # a predictor picks 3 of the 50 tokens of each frame: norm, 512 - 256, with the first token's
    # beside it 512 - 256 - 1; the class token stays, so there are 4
    peer, n = clip4clip(), 50 * FRAMES
    peer['video'] += total(norm(n, D), linear(n, D, D // 2), linear(n, D, D // 2),
                           linear(n, D // 2, 1), Counter(matmul=FRAMES * 3 * 50 * D),
                           linear(1 + 4 * FRAMES, D, D, 'hidden'))
    peer['text'] += linear(1 + WORDS, D, D, 'hidden')
    return peer | dict(pairs=pairs(1 + 2 * FRAMES + WORDS * 4 * FRAMES))


def text_pooling(projections):
    """X-Pool's cross attention of a text to the frames of each video, per item of a batch."""
    pooled = total(linear(BATCH, D, D), norm(2 * BATCH, D), pairs(2 * FRAMES))
    work = total(norm(1 + FRAMES, D), pooled)
    if projections:                                      # q of the text, k and v of frames, out
        work += linear(1 + 2 * FRAMES + BATCH, D, D)
    return work


def xpool():
    # no frame transformer, CLIP's own tokenizer with its 77 tokens
    return dict(text=clip_text(77), video=clip_frames(FRAMES),
                pairs=text_pooling(True) + pairs(1))


def tcmgc():
    # pooling by the sentence and by each word, every time twice; its q, k, v and out are switched
    # off. Then sentence and words x pooled video and pooled frames
    peer = clip4clip()
    peer['text'] += linear(1, D, D, 'hidden')
    return peer | dict(pairs=times(2 * (1 + WORDS), text_pooling(False))
                       + pairs((1 + WORDS) * (1 + WORDS)))


def cross_attention(queries, keys):
    # q and out on queries, k and v on keys, one pre-norm over both
    return total(linear(2 * queries, D, D), linear(2 * keys, D, D), norm(queries + keys, D),
                 attend(queries, keys, D))


def merge_module(n, M, conv=True, attention='prototype', score=token_weights, queries=None):
    """
    n tokens -> M: convolution of 3, norm, token weights, the weighted mean, cross attention.
    prototype: M queries to the M merged tokens. center: M queries to all n.
    """
    work = total(norm(n, D), score(n), Counter(matmul=M * n * D))
    if M > 1:                                            # DPC-KNN: distances of all tokens
        work += Counter(matmul=n * n * D)
    if conv:
        work += Counter(conv=n * 3 * D * D)
    if attention == 'prototype':
        work += cross_attention(queries or M, M)
    elif attention == 'center':
        work += cross_attention(M, n)
    return work


def hbi():
    # entity, action, event: 32 - 8 - 4 words, 12 - 3 - 2 frames, single-layer scores, center
    peer, levels = clip4clip(), dict(text=(WORDS, 8, 4), video=(FRAMES, 3, 2))
    for side, sizes in levels.items():
        for n, M in zip(sizes, sizes[1:]):
            peer[side] += merge_module(n, M, attention='center', score=lambda n: linear(n, D, 1))
        peer[side] += token_weights(sum(sizes))
    return peer | dict(pairs=pairs(sum(t * v for t, v in zip(*levels.values()))))


def phanet(Np=6, prototypes=(3, 1), conv=True, attention=('prototype', 'prototype'), words=WORDS,
           frames=FRAMES, projected=50, queries=None, side=224):
    """Tokens + prototypes -> block -> merge to Np + prototypes -> block -> merge to one."""
    peer = dict(text=clip_text(words), video=clip_frames(frames, projected, side))
    P_I, P_L = prototypes
    for name, tokens in (('text', words), ('video', frames)):
        n, m = tokens + P_I, Np + P_L
        peer[name] += total(
            times(4, clip_block(n, D)), token_weights(n),                        # individual level
            merge_module(n, Np, conv, attention[0], queries=queries),
            times(4, clip_block(m, D)), token_weights(m),                        # local level
            merge_module(m, 1, conv, attention[1]))                              # global level
    level_I = (words + P_I) * (frames + P_I)
    return peer | dict(pairs=pairs(level_I + (Np + P_L) ** 2 + 1))


PEERS = {'HBI': hbi, 'CLIP4Clip': clip4clip, 'X-Pool': xpool, 'X-CLIP': xclip, 'DRL': drl,
         'UCoFiA': ucofia, 'TC-MGC': tcmgc, 'PHA-Net': phanet}


def item(peer):
    """A text, a video and their part in the pairs of a batch of 64."""
    return total(*peer.values())


def clip_layer_parameters(d):
    return dict(mlp=2 * 4 * d * d + 4 * d + d, attention=4 * d * d + 4 * d, norms=4 * d)


def pha_parameters(blocks_I=1, blocks_L=1):
    """
    What thop adds up, (module by module): CLIP's patch convolution and MLPs, the MLPs of the blocks
    (4 layers each), four token weights, four merge modules; no attention weight of CLIP's kind, no
    embedding, no prototype. blocks: 1 shared by text and video, 2 not.
    """
    weights = D * 2 * D + 2 * D + 2 * D + 1              # 512 - 1024 - 1 with biases
    merge = 3 * D * D + 2 * D + weights + 4 * D * D + 4 * D + 2 * D
    return (3 * 32 * 32 * 768 + 12 * clip_layer_parameters(768)['mlp']
            + (12 + 4 * blocks_I + 4 * blocks_L) * clip_layer_parameters(D)['mlp']
            + 4 * weights + 4 * merge)


def pha_true_parameters():
    """All of them: CLIP ViT-B/32, two blocks with a table of 77 positions each, the head."""
    layer = {d: sum(clip_layer_parameters(d).values()) for d in (768, D)}
    image = 3 * 32 * 32 * 768 + 768 + 50 * 768 + 2 * 2 * 768 + 12 * layer[768] + 768 * D
    text = 49408 * D + 77 * D + 12 * layer[D] + 2 * D + D * D
    weights = D * 2 * D + 2 * D + 2 * D + 1
    merge = 3 * D * D + 2 * D + weights + 4 * D * D + 4 * D + 2 * D
    return image + text + 1 + 2 * (4 * layer[D] + 77 * D) + 4 * D + 4 * weights + 4 * merge


# -----------------------------------------------------------------------------
# SLQ

N_QUERIES, SLQ_RANK = 20, 8
SLQ_TOWERS = {'InternVL3-1B': 'InternViT', 'InternVL3-8B': 'InternViT', 'Qwen3VL-2B': 'Qwen3-VL',
              'Qwen3VL-4B': 'Qwen3-VL'}


def llm_parameters(llm):
    """The LLM with embedding, lm_head (unless tied), norms and the biases of q, k, v (Qwen2)."""
    shapes = llm_linears(llm)
    layer = sum(a * b for a, b in shapes) + 2 * llm['d']
    layer += 2 * llm['head'] if llm.get('qk_norm') else sum(b for _, b in shapes[:3])
    tables = llm['vocab'] * llm['d'] * (1 if llm.get('tied') else 2)
    return llm['layers'] * layer + llm['d'] + tables


def lora_parameters(llm, r):
    return llm['layers'] * r * sum(a + b for a, b in llm_linears(llm))


def slq_parameters(llm, N=N_QUERIES):
    return N * llm['d'] + 1                              # the queries and the temperature


def image_vision(name, side=448):
    """A picture: tower, then groups of 2 x 2 patches through an MLP to the LLM's width."""
    tower, d = TOWERS[SLQ_TOWERS[name]] | dict(side=side), LLMS[name]['d']
    n, C = image_tokens(name, side), 4 * tower['d']
    hidden = d if SLQ_TOWERS[name] == 'InternViT' else C
    merger = linear(n, C, hidden) + linear(n, hidden, d)
    # Qwen3-VL has three more mergers, whose output is added inside the LLM (deepstack)
    return vision(tower, 1) + times(1 if SLQ_TOWERS[name] == 'InternViT' else 4, merger)


def image_tokens(name, side=448):
    return patches(TOWERS[SLQ_TOWERS[name]] | dict(side=side)) // 4


def backward(work):
    # of frozen weights: each linear once more for its input's gradient, products of activations
    # twice, for both of their sides
    return Counter(linear=work['linear'], matmul=2 * work['matmul'])


def plain_step(llm, n, N=N_QUERIES, checkpointing=False):
    """
    Forward and backward of all n + N tokens. Checkpointing runs each layer once more, up to the
    input of its last linear: torch stops where all that backward needs is there.
    """
    forward = llm_pass(llm, n + N)
    again = forward - times(llm['layers'], linear(n + N, *llm_linears(llm)[-1]))
    return total(forward, again if checkpointing else Counter(), backward(forward))


def cache_step(llm, n, N=N_QUERIES, checkpointing=True):
    """The content once, without gradient, up to the last layer's q, k, v; then N queries on it."""
    last = total(*(linear(n, a, b) for a, b in llm_linears(llm)[:3]))
    queries = llm_pass(llm, N, keys=n + N)
    return total(llm_pass(llm, n, layers=llm['layers'] - 1), last,
                 times(2 if checkpointing else 1, queries), backward(queries))


def slq_item(name, n, N=N_QUERIES):
    """Encoding one content of n tokens and N queries."""
    return llm_pass(LLMS[name], n + N)


# -----------------------------------------------------------------------------
# what a paper prints, and a row of a table

GIGA, TERA = 1e9, 1e12
WHOLE = sum(GALLERY.values())  # 7,920 videos of MARS's four sets, and as many queries
UNITS = {'k': 1e3, 'K': 1e3, 'M': 1e6, 'B': 1e9}


def printed(text):
    """A paper's '36k' or '1,740.8' -> its number, in the printed unit, and half its last digit."""
    digits = text.rstrip('kKMB').replace(',', '')
    return float(digits), 0.5 * 10.0 ** -len(digits.partition('.')[2])


def row(model, cell, ours, rule, paper=None):
    """A row of the JSON. `paper` is the text as printed; `ours` is in the printed unit."""
    value = printed(paper)[0] if paper else None
    return {'model': model, 'cell': cell, 'paper': value, 'ours': ours,
            'diff': ours - value if paper else None, 'rule': rule, 'printed': paper}


def agrees(r):
    return abs(r['diff']) <= printed(r['printed'])[1] + 1e-9
