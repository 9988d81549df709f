//! Solver: from demand and capacity to shares.
//!
//! The first step computes the *target*, from the input alone: in the order of how constrained the classes are, and
//! then of the distance from source to region, demand takes the free capacity of each pool. The second step moves each
//! row from its current shares towards its target, by at most [`MAX_SHIFT_PERMILLE`]. Because the target does not
//! depend on the past, rows converge.
//!
//! The inner loop runs over the pairs of a source and a region, nearest first, and over the unplaced rows of that
//! source, of which few remain after its nearest region. The largest input takes at most two million iterations, and a
//! hundred thousand in practice.

use std::collections::BTreeMap;

use super::{
    ClassDemand, DeploymentCapacity, MAX_SHIFT_PERMILLE, MIN_SHIFT_PERMILLE, PlanInput, Row, Source,
    TrafficClass,
};
use regions::set::MAX_REGIONS;
use regions::weights::WHOLE_PERMILLE;
use regions::weights::{Share, ShareReason};
use regions::{RegionIndex, RegionSet};

/// A whole row.
const WHOLE: u16 = WHOLE_PERMILLE;
/// Placeholder for a missing pool index.
const NONE: u32 = u32::MAX;

/// Class with its candidate regions.
struct ClassCandidates<'a> {
    class: &'a TrafficClass,
    demand: &'a ClassDemand,
    /// Allowed regions with ready replicas; with an order, the first of them.
    serving: RegionSet,
    /// The serving regions that are not draining; all of them if all are draining.
    preferred: RegionSet,
    only_draining: bool,
    /// Pool index by column, where the columns are the regions that have a pool.
    pools: Vec<u32>,
}

/// Row that is being computed.
struct RowState<'a> {
    class: usize,
    source: Source,
    demand: u64,
    unplaced: u64,
    /// Nearest of the preferred regions.
    nearest: Option<RegionIndex>,
    previous: Option<&'a Row>,
}

/// Part of a row's target, in tokens per second.
#[derive(Clone, Copy)]
struct TargetPart {
    row: u32,
    region: RegionIndex,
    tokens: u64,
    reason: ShareReason,
}

/// Parts of all rows' targets, those of a row nearest first. They are collected in the order of placement and sorted by
/// row afterwards: one list per row would take most of the time of a plan.
#[derive(Default)]
struct RowTargets {
    parts: Vec<TargetPart>,
    /// Index of the first part of each row, and of the end of the last row.
    begin: Vec<usize>,
}

impl RowTargets {
    fn by_row(mut self, states: usize) -> RowTargets {
        let mut begin = vec![0; states + 1];
        for part in &self.parts {
            begin[part.row as usize + 1] += 1;
        }
        for state in 0..states {
            begin[state + 1] += begin[state];
        }
        let mut next = begin.clone();
        let mut sorted = self.parts.clone();
        for part in &self.parts {
            let at = &mut next[part.row as usize];
            sorted[*at] = *part;
            *at += 1;
        }
        self.parts = sorted;
        RowTargets { begin, ..self }
    }

    fn of(&self, state: usize) -> &[TargetPart] {
        &self.parts[self.begin[state]..self.begin[state + 1]]
    }
}

/// Upper limit of a demand: far above any real demand, and small enough to be multiplied by 1000.
const DEMAND_MAX: u64 = 1 << 53;

/// Free capacity of each pool.
struct FreeCapacity<'a> {
    input: &'a PlanInput,
    free: Vec<u64>,
    /// Regions that have a pool, in order, and the column of each region.
    regions: Vec<RegionIndex>,
    column: Box<[u32; MAX_REGIONS]>,
}

impl<'a> FreeCapacity<'a> {
    fn new(input: &'a PlanInput) -> FreeCapacity<'a> {
        let regions: RegionSet = input.pools.iter().map(|pool| pool.region).collect();
        let mut column = Box::new([NONE; MAX_REGIONS]);
        for (at, region) in regions.iter().enumerate() {
            column[region.as_usize()] = at as u32;
        }
        let free = input.pools.iter().map(|pool| pool.tokens_per_second).collect();
        FreeCapacity { input, free, regions: regions.iter().collect(), column }
    }

    fn capacity(&self, pool: usize) -> u64 {
        self.input.pools[pool].tokens_per_second
    }

    /// Returns the pool of a class in one of its serving regions.
    fn of(&self, candidates: &ClassCandidates<'_>, region: RegionIndex) -> usize {
        candidates.pools[self.column[region.as_usize()] as usize] as usize
    }
}

/// Returns the rows that follow `previous`.
pub(super) fn rows(
    input: &PlanInput,
    previous: &BTreeMap<TrafficClass, BTreeMap<Source, Row>>,
) -> BTreeMap<TrafficClass, BTreeMap<Source, Row>> {
    let mut pools = FreeCapacity::new(input);
    let classes: Vec<ClassCandidates<'_>> =
        input.demand.iter().filter_map(|(class, demand)| class_candidates(&pools, class, demand)).collect();
    let mut states = row_states(&classes, previous);
    let targets = targets(&mut pools, &classes, &mut states);
    let overloaded = overloaded(&pools, &classes, &states);
    // The rows of a class are adjacent, and classes and rows are sorted, so the result is sorted too.
    let mut number = 0;
    let by_class = states.chunk_by(|one, next| one.class == next.class);
    let rows = by_class.map(|states| {
        let candidates = &classes[states[0].class];
        let rows = states.iter().map(|state| {
            let fits = current_shares(candidates, state)
                .all(|share| !overloaded[pools.of(candidates, share.region)]);
            let row = step(candidates, state, targets.of(number), fits);
            number += 1;
            (state.source, row)
        });
        (candidates.class.clone(), rows.collect())
    });
    rows.collect()
}

/// Returns the candidate regions of a class; `None` if no allowed region serves it.
fn class_candidates<'a>(
    pools: &FreeCapacity<'a>,
    class: &'a TrafficClass,
    demand: &'a ClassDemand,
) -> Option<ClassCandidates<'a>> {
    let deployments = pools.input.deployments.get(&class.deployment)?;
    let serves = |(region, capacity): &(&RegionIndex, &DeploymentCapacity)| {
        demand.allowed.contains(**region) && capacity.ready > 0 && pools.capacity(capacity.pool) > 0
    };
    let mut of = vec![NONE; pools.regions.len()];
    let mut serving = RegionSet::EMPTY;
    for (region, capacity) in deployments.iter().filter(serves) {
        serving.insert(*region);
        of[pools.column[region.as_usize()] as usize] = capacity.pool as u32;
    }
    let not_draining = serving.minus(pools.input.draining);
    let only_draining = not_draining.is_empty();
    let preferred = if only_draining { serving } else { not_draining };
    if preferred.is_empty() {
        return None;
    }
    // The first region of an order takes the whole row at once: shares elsewhere count as those of a lost region.
    let first = demand.order.iter().find(|region| preferred.contains(**region));
    let only = |first: &RegionIndex| RegionSet::from_iter([*first]);
    let (serving, preferred) = first.map_or((serving, preferred), |first| (only(first), only(first)));
    Some(ClassCandidates { class, demand, serving, preferred, only_draining, pools: of })
}

fn row_states<'a>(
    classes: &[ClassCandidates<'a>],
    previous: &'a BTreeMap<TrafficClass, BTreeMap<Source, Row>>,
) -> Vec<RowState<'a>> {
    let mut states =
        Vec::with_capacity(classes.iter().map(|candidates| candidates.demand.by_source.len()).sum());
    for (number, candidates) in classes.iter().enumerate() {
        let previous = previous.get(candidates.class);
        for (source, tokens) in &candidates.demand.by_source {
            // A source without demand is planned too: its next request needs a region.
            let demand = (*tokens).clamp(1, DEMAND_MAX);
            states.push(RowState {
                class: number,
                source: *source,
                demand,
                unplaced: demand,
                nearest: None,
                previous: previous.and_then(|rows| rows.get(source)),
            });
        }
    }
    states
}

/// Computes the target of every row.
fn targets(
    pools: &mut FreeCapacity<'_>,
    classes: &[ClassCandidates<'_>],
    states: &mut [RowState<'_>],
) -> RowTargets {
    let mut targets = RowTargets { parts: Vec::with_capacity(states.len()), begin: Vec::new() };
    let mut sources: Vec<Source> = states.iter().map(|state| state.source).collect();
    sources.sort_unstable();
    sources.dedup();
    let mut pairs = Vec::with_capacity(sources.len() * pools.regions.len());
    for (at, source) in sources.iter().enumerate() {
        for (number, region) in pools.regions.iter().enumerate() {
            let rtt = pools.input.rtt.get(&(source.origin, *region));
            pairs.push((rtt.map_or(u64::MAX, |rtt| rtt.as_micros() as u64), at, number));
        }
    }
    pairs.sort_unstable();
    // Rows by the number of preferred regions, then by source: classes with few regions come first.
    let mut levels: BTreeMap<usize, Vec<Vec<u32>>> = BTreeMap::new();
    for (at, state) in states.iter().enumerate() {
        let level = classes[state.class].preferred.len();
        let by_source = levels.entry(level).or_insert_with(|| vec![Vec::new(); sources.len()]);
        let source = sources.binary_search(&state.source).expect("the sources come from these rows");
        by_source[source].push(u32::try_from(at).expect("a plan has fewer rows"));
    }
    for by_source in levels.values_mut() {
        for (_, source, number) in &pairs {
            let region = pools.regions[*number];
            by_source[*source].retain(|at| {
                let state = &mut states[*at as usize];
                let taken = allocate(pools, &classes[state.class], state, region, *number);
                targets.parts.extend(taken.map(|(tokens, reason)| TargetPart {
                    row: *at,
                    region,
                    tokens,
                    reason,
                }));
                state.unplaced > 0
            });
        }
        for at in by_source.iter().flatten() {
            let state = &mut states[*at as usize];
            let divided = divide_overload(pools, &classes[state.class], state);
            let part = |(region, tokens, reason)| TargetPart { row: *at, region, tokens, reason };
            targets.parts.extend(divided.into_iter().map(part));
        }
    }
    targets.by_row(states.len())
}

/// Places as much of a row's demand as fits into a region.
fn allocate(
    pools: &mut FreeCapacity<'_>,
    candidates: &ClassCandidates<'_>,
    state: &mut RowState<'_>,
    region: RegionIndex,
    number: usize,
) -> Option<(u64, ShareReason)> {
    let pool = candidates.pools[number];
    if pool == NONE || !candidates.preferred.contains(region) {
        return None;
    }
    let first = state.nearest.is_none();
    state.nearest.get_or_insert(region);
    let free = &mut pools.free[pool as usize];
    let taken = state.unplaced.min(*free);
    if taken == 0 {
        return None;
    }
    *free -= taken;
    state.unplaced -= taken;
    let reason = match (candidates.only_draining, first) {
        (true, _) => ShareReason::OnlyHere,
        (false, true) => ShareReason::Nearest,
        (false, false) => ShareReason::NearerFull,
    };
    Some((taken, reason))
}

/// Divides the demand that fits nowhere over the preferred regions, in proportion to their capacity.
fn divide_overload(
    pools: &FreeCapacity<'_>,
    candidates: &ClassCandidates<'_>,
    state: &mut RowState<'_>,
) -> Vec<(RegionIndex, u64, ShareReason)> {
    let capacity = |region: RegionIndex| pools.capacity(pools.of(candidates, region));
    let whole: u128 = candidates.preferred.iter().map(|region| u128::from(capacity(region))).sum();
    let overload = state.unplaced;
    let reason = if candidates.only_draining { ShareReason::OnlyHere } else { ShareReason::AllFull };
    let mut left = overload;
    let divided = candidates.preferred.iter().map(|region| {
        let part = u128::from(overload) * u128::from(capacity(region)) / whole.max(1);
        let part = u64::try_from(part).expect("a part of what is left");
        left -= part;
        (region, part, reason)
    });
    let mut divided: Vec<_> = divided.collect();
    // The remainder of rounding down.
    let (_, tokens, _) = divided.first_mut().expect("a class has a preferred region");
    *tokens += left;
    state.unplaced = 0;
    divided
}

/// Returns for each pool whether the current shares would overload it.
fn overloaded(
    pools: &FreeCapacity<'_>,
    classes: &[ClassCandidates<'_>],
    states: &[RowState<'_>],
) -> Vec<bool> {
    let mut loads = vec![0u64; pools.input.pools.len()];
    for state in states {
        let candidates = &classes[state.class];
        for share in current_shares(candidates, state) {
            let load = &mut loads[pools.of(candidates, share.region)];
            *load = load.saturating_add(part(state.demand, share.permille));
        }
    }
    loads.into_iter().enumerate().map(|(pool, load)| load > pools.capacity(pool)).collect()
}

/// Returns this permille share of a demand.
fn part(demand: u64, permille: u16) -> u64 {
    demand * u64::from(permille) / u64::from(WHOLE)
}

/// Returns the current shares of a row that are still served. A row without a previous plan went to the nearest region.
fn current_shares<'a>(
    candidates: &'a ClassCandidates<'_>,
    state: &'a RowState<'_>,
) -> impl Iterator<Item = Share> + 'a {
    let planned = state.previous.into_iter().flatten().copied();
    let nearest = state.nearest.filter(|_| state.previous.is_none());
    let unplanned = nearest.map(|region| Share { region, permille: WHOLE, reason: ShareReason::Nearest });
    planned.chain(unplanned).filter(|share| candidates.serving.contains(share.region))
}

/// Moves a row from its current shares towards its target.
fn step(candidates: &ClassCandidates<'_>, state: &RowState<'_>, target: &[TargetPart], fits: bool) -> Row {
    // Fast path: in a stable fleet nearly all rows already have their target.
    if let [TargetPart { region, reason, .. }] = *target
        && current_shares(candidates, state).all(|share| share.region == region && share.permille == WHOLE)
        && current_shares(candidates, state).next().is_some()
    {
        return vec![Share { region, permille: WHOLE, reason }];
    }
    let target = to_permille(target);
    let current: Vec<Share> = current_shares(candidates, state).collect();
    let of = |shares: &[Share], region| {
        shares.iter().find(|share| share.region == region).map_or(0, |share| share.permille)
    };
    let lost = WHOLE - current.iter().map(|share| share.permille).sum::<u16>();
    let excess = |share: &Share| share.permille.saturating_sub(of(&target, share.region));
    let to_move: u16 = current.iter().map(excess).sum();
    let unchanged = lost == 0 && to_move < MIN_SHIFT_PERMILLE && fits;
    let mut outgoing = if unchanged { 0 } else { to_move.min(MAX_SHIFT_PERMILLE) };
    let mut incoming = lost + outgoing;
    let mut row = Vec::with_capacity(current.len() + target.len());
    // Regions outside the target are reduced first: draining ones and distant ones.
    for in_target in [false, true] {
        for share in current.iter().filter(|share| (of(&target, share.region) > 0) == in_target) {
            let less = excess(share).min(outgoing);
            outgoing -= less;
            row.push(Share { permille: share.permille - less, ..*share });
        }
    }
    for goal in &target {
        let there = row.iter_mut().find(|share: &&mut Share| share.region == goal.region);
        let has = there.as_ref().map_or(0, |share| share.permille);
        let more = goal.permille.saturating_sub(has).min(incoming);
        incoming -= more;
        match there {
            Some(share) => share.permille += more,
            None => row.push(Share { permille: more, ..*goal }),
        }
    }
    row.retain(|share| share.permille > 0);
    for share in &mut row {
        let goal = target.iter().find(|goal| goal.region == share.region);
        share.reason = match goal {
            Some(goal) if unchanged && goal.permille != share.permille => ShareReason::Kept,
            None if unchanged => ShareReason::Kept,
            Some(goal) if share.permille <= goal.permille => goal.reason,
            Some(_) | None => ShareReason::Leaving,
        };
    }
    row.sort_unstable_by_key(|share| share.region);
    debug_assert_eq!(row.iter().map(|share| share.permille).sum::<u16>(), WHOLE);
    row
}

/// Converts a row's target to permille, nearest first. Rounds down and gives the remainder to the shares with the
/// largest loss.
fn to_permille(target: &[TargetPart]) -> Row {
    // A full region has two parts: the part that fitted, and its part of the overload.
    let mut whole = 0;
    let mut parts: Vec<TargetPart> = Vec::with_capacity(target.len());
    for part in target {
        whole += part.tokens;
        match parts.iter_mut().find(|known| known.region == part.region) {
            Some(known) => (known.tokens, known.reason) = (known.tokens + part.tokens, part.reason),
            None => parts.push(*part),
        }
    }
    let mut lost = Vec::with_capacity(parts.len());
    let mut row: Row = Vec::with_capacity(parts.len());
    for (at, TargetPart { region, tokens, reason, .. }) in parts.into_iter().enumerate() {
        let exact = tokens * u64::from(WHOLE);
        let permille = u16::try_from(exact / whole).expect("a thousand at most");
        lost.push((std::cmp::Reverse(exact % whole), at));
        row.push(Share { region, permille, reason });
    }
    lost.sort_unstable();
    let over = usize::from(WHOLE - row.iter().map(|share| share.permille).sum::<u16>());
    for (_, at) in lost.into_iter().take(over) {
        row[at].permille += 1;
    }
    row.retain(|share| share.permille > 0);
    row
}
