/* Prioritized replay of the rows of `rows.py` on one core, as a lower bound for what a library can reach.
 *
 * The same work as a call of the buffer: stratified draws by exact integer masses in a tree of 16 children a node,
 * all five fields and importance-sampling weights of each drawn row, and masses from new TD errors. Nothing is checked,
 * nothing is allocated and there is no Python in it.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define FAN 16
#define LEVELS 8
#define SCALE 16777216.0f /* masses count steps of 2^-24 */
#define BLOCK 64          /* draws that go down the tree together, so that their cache misses overlap */

typedef struct {
    float obs[4], next_obs[4];
    int64_t action;
    float reward;
    uint8_t terminated;
} Row;

typedef struct {
    int64_t capacity, next, size;
    int levels;
    int64_t *level[LEVELS]; /* level[0] has the mass of each slot, each further one the sums of FAN masses below */
    int64_t width[LEVELS];
    Row *rows;
    uint64_t random[4];
    float alpha, beta, eps;
    int64_t largest;
} Replay;

static uint64_t rotate(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }

/* xoshiro256** by Blackman and Vigna, which is in the public domain */
static uint64_t draw(uint64_t *s) {
    uint64_t result = rotate(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0], s[3] ^= s[1], s[1] ^= s[2], s[0] ^= s[3], s[2] ^= t, s[3] = rotate(s[3], 45);
    return result;
}

/* memory in pages of 2 MB, with fewer misses of the TLB */
static void *pages(size_t bytes) {
    size_t page = (size_t)1 << 21, whole = (bytes + page - 1) / page * page;
    void *found = aligned_alloc(page, whole);
    madvise(found, whole, MADV_HUGEPAGE);
    return memset(found, 0, whole);
}

Replay *replay_make(int64_t capacity, float alpha, float beta, float eps) {
    Replay *r = calloc(1, sizeof *r);
    r->capacity = capacity, r->alpha = alpha, r->beta = beta, r->eps = eps, r->largest = (int64_t)SCALE;
    int64_t width = capacity;
    do {
        int64_t padded = (width + FAN - 1) / FAN * FAN;
        r->level[r->levels] = pages(padded * sizeof(int64_t));
        r->width[r->levels++] = padded;
        width = padded / FAN;
    } while (width > 1);
    r->rows = pages(capacity * sizeof(Row));
    for (int i = 0; i < 4; i++) r->random[i] = 0x9e3779b97f4a7c15u * (i + 1);
    return r;
}

void replay_free(Replay *r) {
    for (int i = 0; i < r->levels; i++) free(r->level[i]);
    free(r->rows), free(r);
}

static int64_t total(const Replay *r) {
    const int64_t *top = r->level[r->levels - 1];
    int64_t sum = 0;
    for (int64_t i = 0; i < r->width[r->levels - 1]; i++) sum += top[i];
    return sum;
}

static void put(Replay *r, int64_t slot, int64_t mass) {
    int64_t change = mass - r->level[0][slot];
    for (int i = 0; i < r->levels; i++, slot /= FAN) r->level[i][slot] += change;
}

void replay_add(Replay *r, int64_t count, const float *obs, const int64_t *action, const float *reward,
                const float *next_obs, const uint8_t *terminated) {
    for (int64_t i = 0; i < count; i++) {
        Row *row = r->rows + r->next;
        memcpy(row->obs, obs + 4 * i, sizeof row->obs);
        memcpy(row->next_obs, next_obs + 4 * i, sizeof row->next_obs);
        row->action = action[i], row->reward = reward[i], row->terminated = terminated[i];
        put(r, r->next, r->largest);
        r->next = r->next + 1 == r->capacity ? 0 : r->next + 1;
        r->size += r->size < r->capacity;
    }
}

void replay_sample(Replay *r, int64_t batch, int64_t *slots, float *obs, int64_t *action, float *reward,
                   float *next_obs, uint8_t *terminated, float *weight) {
    int64_t sum = total(r), left[BLOCK], node[BLOCK];
    double stratum = (double)sum / batch;
    for (int64_t first = 0; first < batch; first += BLOCK) {
        int64_t count = batch - first < BLOCK ? batch - first : BLOCK;
        for (int64_t j = 0; j < count; j++) {
            double place = (first + j + (draw(r->random) >> 11) * 0x1p-53) * stratum;
            left[j] = (int64_t)place < sum ? (int64_t)place : sum - 1, node[j] = 0;
        }
        for (int level = r->levels - 1; level >= 0; level--) {
            for (int64_t j = 0; j < count; j++) {
                const int64_t *mass = r->level[level] + node[j] * FAN;
                int64_t rest = left[j], below = 0, child = 0;
                int64_t end = 0;
                for (int k = 0; k < FAN - 1; k++) {
                    end += mass[k];
                    int passed = end <= rest;
                    child += passed, below = passed ? end : below;
                }
                left[j] = rest - below, node[j] = node[j] * FAN + child;
                const char *next = level ? (char *)(r->level[level - 1] + node[j] * FAN) : (char *)(r->rows + node[j]);
                __builtin_prefetch(next), __builtin_prefetch(next + 64);
            }
        }
        for (int64_t j = 0; j < count; j++) {
            const Row *row = r->rows + node[j];
            int64_t i = first + j;
            slots[i] = node[j];
            memcpy(obs + 4 * i, row->obs, sizeof row->obs);
            memcpy(next_obs + 4 * i, row->next_obs, sizeof row->next_obs);
            action[i] = row->action, reward[i] = row->reward, terminated[i] = row->terminated;
            weight[i] = (float)r->level[0][node[j]];
        }
    }
    float scale = (float)r->size / (float)sum, most = 0;
    for (int64_t i = 0; i < batch; i++) weight[i] = powf(weight[i] * scale, -r->beta);
    for (int64_t i = 0; i < batch; i++) most = weight[i] > most ? weight[i] : most;
    for (int64_t i = 0; i < batch; i++) weight[i] /= most;
}

void replay_update(Replay *r, int64_t batch, const int64_t *slots, const float *priority) {
    float mass[BLOCK];
    for (int64_t first = 0; first < batch; first += BLOCK) {
        int64_t count = batch - first < BLOCK ? batch - first : BLOCK;
        for (int64_t j = 0; j < count; j++) {
            mass[j] = powf(priority[first + j] + r->eps, r->alpha) * SCALE;
            __builtin_prefetch(r->level[0] + slots[first + j], 1);
        }
        for (int64_t j = 0; j < count; j++) {
            int64_t steps = (int64_t)mass[j] < 1 ? 1 : (int64_t)mass[j];
            if (steps > r->largest) r->largest = steps;
            put(r, slots[first + j], steps);
        }
    }
}
