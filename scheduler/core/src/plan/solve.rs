//! From demand and capacity to shares.
//!
//! First the *target*, which looks at nothing but the problem: in the order of how constrained classes are, and then of how
//! near a source is to a region, demand takes what is left of each pool. Then each row goes from where it was towards its
//! target, as far as a step reaches. As the target does not hang on the past, rows come to rest there.
//!
//! The inner loop is over the pairs of a source and a region, nearest first, and over the rows of that source that still
//! want something, of which there are few after its nearest region: so the largest problem is two million looks at most
//! and a hundred thousand in practice.

use std::collections::BTreeMap;

use super::{Class, Demand, Place, Problem, Row, STEP_PERMILLE, Source, WORTH_PERMILLE};
use regions::set::MAX_REGIONS;
use regions::weights::WHOLE_PERMILLE;
use regions::weights::{Share, Why};
use regions::{RegionIndex, RegionSet};

/// All of a row.
const WHOLE: u16 = WHOLE_PERMILLE;
/// In place of the number of a pool: there is none.
const NONE: u32 = u32::MAX;

/// One class, as it is looked at again and again.
struct Choice<'a> {
    class: &'a Class,
    demand: &'a Demand,
    /// Where it is served and may be.
    standing: RegionSet,
    /// Of these, where it should go: not to one that is drained, unless there are no others.
    wanted: RegionSet,
    confined: bool,
    /// The pool of each region in `standing`, by the region's number among those that have one.
    pools: Vec<u32>,
}

/// One row on its way.
struct Line<'a> {
    choice: usize,
    source: Source,
    demand: u64,
    left: u64,
    /// The nearest region of all that it should go to.
    nearest: Option<RegionIndex>,
    before: Option<&'a Row>,
}

/// A part of a line's target, in tokens per second.
#[derive(Clone, Copy)]
struct Part {
    line: u32,
    region: RegionIndex,
    tokens: u64,
    why: Why,
}

/// The parts of all lines' targets, those of a line nearest first. They are gathered in the order in which they are found
/// and put together by line afterwards: a list of its own for each line would be most of what a plan costs.
#[derive(Default)]
struct Targets {
    parts: Vec<Part>,
    /// Where those of each line begin, and where the last end.
    begin: Vec<usize>,
}

impl Targets {
    fn by_line(mut self, lines: usize) -> Targets {
        let mut begin = vec![0; lines + 1];
        for part in &self.parts {
            begin[part.line as usize + 1] += 1;
        }
        for line in 0..lines {
            begin[line + 1] += begin[line];
        }
        let mut next = begin.clone();
        let mut sorted = self.parts.clone();
        for part in &self.parts {
            let at = &mut next[part.line as usize];
            sorted[*at] = *part;
            *at += 1;
        }
        self.parts = sorted;
        Targets { begin, ..self }
    }

    fn of(&self, line: usize) -> &[Part] {
        &self.parts[self.begin[line]..self.begin[line + 1]]
    }
}

/// More than anybody is asked for; and a thousand times as much is a number still.
const DEMAND_MAX: u64 = 1 << 53;

/// What is left of each pool.
struct Pools<'a> {
    problem: &'a Problem,
    free: Vec<u64>,
    /// The regions that have a pool, in order, and the number of each.
    regions: Vec<RegionIndex>,
    number: Box<[u32; MAX_REGIONS]>,
}

impl<'a> Pools<'a> {
    fn new(problem: &'a Problem) -> Pools<'a> {
        let has_one: RegionSet = problem.pools.iter().map(|pool| pool.region).collect();
        let mut number = Box::new([NONE; MAX_REGIONS]);
        for (at, region) in has_one.iter().enumerate() {
            number[region.as_usize()] = at as u32;
        }
        let free = problem.pools.iter().map(|pool| pool.tokens_per_second).collect();
        Pools { problem, free, regions: has_one.iter().collect(), number }
    }

    fn capacity(&self, pool: usize) -> u64 {
        self.problem.pools[pool].tokens_per_second
    }

    /// The pool of a class in a region where it stands.
    fn of(&self, choice: &Choice<'_>, region: RegionIndex) -> usize {
        choice.pools[self.number[region.as_usize()] as usize] as usize
    }
}

/// The rows that follow `previous`.
pub(super) fn rows(
    problem: &Problem,
    previous: &BTreeMap<Class, BTreeMap<Source, Row>>,
) -> BTreeMap<Class, BTreeMap<Source, Row>> {
    let mut pools = Pools::new(problem);
    let choices: Vec<Choice<'_>> =
        problem.demand.iter().filter_map(|(class, demand)| choice(&pools, class, demand)).collect();
    let mut lines = lines(&choices, previous);
    let targets = target(&mut pools, &choices, &mut lines);
    let full = full(&pools, &choices, &lines);
    // The lines of a class stand together, and both are in order: so are the rows.
    let mut number = 0;
    let of_a_class = lines.chunk_by(|one, next| one.choice == next.choice);
    let rows = of_a_class.map(|lines| {
        let choice = &choices[lines[0].choice];
        let rows = lines.iter().map(|line| {
            let fits = before(choice, line).all(|share| !full[pools.of(choice, share.region)]);
            let row = step(choice, line, targets.of(number), fits);
            number += 1;
            (line.source, row)
        });
        (choice.class.clone(), rows.collect())
    });
    rows.collect()
}

/// Where a class may go; nothing if it is served nowhere that may see it.
fn choice<'a>(pools: &Pools<'a>, class: &'a Class, demand: &'a Demand) -> Option<Choice<'a>> {
    let places = pools.problem.places.get(&class.deployment)?;
    let serves = |(region, place): &(&RegionIndex, &Place)| {
        demand.allowed.contains(**region) && place.ready > 0 && pools.capacity(place.pool) > 0
    };
    let mut of = vec![NONE; pools.regions.len()];
    let mut standing = RegionSet::EMPTY;
    for (region, place) in places.iter().filter(serves) {
        standing.insert(*region);
        of[pools.number[region.as_usize()] as usize] = place.pool as u32;
    }
    let elsewhere = standing.minus(pools.problem.draining);
    let confined = elsewhere.is_empty();
    let wanted = if confined { standing } else { elsewhere };
    if wanted.is_empty() {
        return None;
    }
    Some(Choice { class, demand, standing, wanted, confined, pools: of })
}

fn lines<'a>(choices: &[Choice<'a>], previous: &'a BTreeMap<Class, BTreeMap<Source, Row>>) -> Vec<Line<'a>> {
    let mut lines = Vec::with_capacity(choices.iter().map(|choice| choice.demand.by_source.len()).sum());
    for (number, choice) in choices.iter().enumerate() {
        let before = previous.get(choice.class);
        for (source, tokens) in &choice.demand.by_source {
            // Who asks for nothing now is planned for all the same: the next request has to go somewhere.
            let demand = (*tokens).clamp(1, DEMAND_MAX);
            lines.push(Line {
                choice: number,
                source: *source,
                demand,
                left: demand,
                nearest: None,
                before: before.and_then(|rows| rows.get(source)),
            });
        }
    }
    lines
}

/// Every line's target.
fn target(pools: &mut Pools<'_>, choices: &[Choice<'_>], lines: &mut [Line<'_>]) -> Targets {
    let mut targets = Targets { parts: Vec::with_capacity(lines.len()), begin: Vec::new() };
    let mut sources: Vec<Source> = lines.iter().map(|line| line.source).collect();
    sources.sort_unstable();
    sources.dedup();
    let mut pairs = Vec::with_capacity(sources.len() * pools.regions.len());
    for (at, source) in sources.iter().enumerate() {
        for (number, region) in pools.regions.iter().enumerate() {
            let away = pools.problem.away.get(&(source.origin, *region));
            pairs.push((away.map_or(u64::MAX, |away| away.as_micros() as u64), at, number));
        }
    }
    pairs.sort_unstable();
    // The lines of each level, by their source: classes that may go to few regions come first.
    let mut levels: BTreeMap<usize, Vec<Vec<u32>>> = BTreeMap::new();
    for (at, line) in lines.iter().enumerate() {
        let level = choices[line.choice].wanted.len();
        let by_source = levels.entry(level).or_insert_with(|| vec![Vec::new(); sources.len()]);
        let source = sources.binary_search(&line.source).expect("they were gathered from these lines");
        by_source[source].push(u32::try_from(at).expect("a plan has fewer rows"));
    }
    for by_source in levels.values_mut() {
        for (_, source, number) in &pairs {
            let region = pools.regions[*number];
            by_source[*source].retain(|at| {
                let line = &mut lines[*at as usize];
                let taken = take(pools, &choices[line.choice], line, region, *number);
                targets.parts.extend(taken.map(|(tokens, why)| Part { line: *at, region, tokens, why }));
                line.left > 0
            });
        }
        for at in by_source.iter().flatten() {
            let line = &mut lines[*at as usize];
            let divided = divide_what_is_too_much(pools, &choices[line.choice], line);
            let part = |(region, tokens, why)| Part { line: *at, region, tokens, why };
            targets.parts.extend(divided.into_iter().map(part));
        }
    }
    targets.by_line(lines.len())
}

/// A line takes what is left for it in a region.
fn take(
    pools: &mut Pools<'_>,
    choice: &Choice<'_>,
    line: &mut Line<'_>,
    region: RegionIndex,
    number: usize,
) -> Option<(u64, Why)> {
    let pool = choice.pools[number];
    if pool == NONE || !choice.wanted.contains(region) {
        return None;
    }
    let first = line.nearest.is_none();
    line.nearest.get_or_insert(region);
    let free = &mut pools.free[pool as usize];
    let taken = line.left.min(*free);
    if taken == 0 {
        return None;
    }
    *free -= taken;
    line.left -= taken;
    let why = match (choice.confined, first) {
        (true, _) => Why::OnlyHere,
        (false, true) => Why::Nearest,
        (false, false) => Why::NearerFull,
    };
    Some((taken, why))
}

/// All regions of a line are full, and it has something left: each has a part of it, by what it can do.
fn divide_what_is_too_much(
    pools: &Pools<'_>,
    choice: &Choice<'_>,
    line: &mut Line<'_>,
) -> Vec<(RegionIndex, u64, Why)> {
    let capacity = |region: RegionIndex| pools.capacity(pools.of(choice, region));
    let whole: u128 = choice.wanted.iter().map(|region| u128::from(capacity(region))).sum();
    let much = line.left;
    let why = if choice.confined { Why::OnlyHere } else { Why::AllFull };
    let mut left = much;
    let divided = choice.wanted.iter().map(|region| {
        let part = u128::from(much) * u128::from(capacity(region)) / whole.max(1);
        let part = u64::try_from(part).expect("a part of what is left");
        left -= part;
        (region, part, why)
    });
    let mut divided: Vec<_> = divided.collect();
    // What is lost in rounding down.
    let (_, tokens, _) = divided.first_mut().expect("it wants to go somewhere");
    *tokens += left;
    line.left = 0;
    divided
}

/// For every pool whether it would be given more than it can take if everything stayed where it is.
fn full(pools: &Pools<'_>, choices: &[Choice<'_>], lines: &[Line<'_>]) -> Vec<bool> {
    let mut loads = vec![0u64; pools.problem.pools.len()];
    for line in lines {
        let choice = &choices[line.choice];
        for share in before(choice, line) {
            let load = &mut loads[pools.of(choice, share.region)];
            *load = load.saturating_add(part(line.demand, share.permille));
        }
    }
    loads.into_iter().enumerate().map(|(pool, load)| load > pools.capacity(pool)).collect()
}

/// So many thousandths of a demand.
fn part(demand: u64, permille: u16) -> u64 {
    demand * u64::from(permille) / u64::from(WHOLE)
}

/// Where a line was, as far as that still stands. A line without a plan went to the nearest.
fn before<'a>(choice: &'a Choice<'_>, line: &'a Line<'_>) -> impl Iterator<Item = Share> + 'a {
    let planned = line.before.into_iter().flatten().copied();
    let nearest = line.nearest.filter(|_| line.before.is_none());
    let unplanned = nearest.map(|region| Share { region, permille: WHOLE, why: Why::Nearest });
    planned.chain(unplanned).filter(|share| choice.standing.contains(share.region))
}

/// From where a line was towards its target.
fn step(choice: &Choice<'_>, line: &Line<'_>, target: &[Part], fits: bool) -> Row {
    // Nearly all rows of a fleet in calm: they are where they should be.
    if let [Part { region, why, .. }] = *target
        && before(choice, line).all(|share| share.region == region && share.permille == WHOLE)
        && before(choice, line).next().is_some()
    {
        return vec![Share { region, permille: WHOLE, why }];
    }
    let target = thousandths(target);
    let was: Vec<Share> = before(choice, line).collect();
    let of = |shares: &[Share], region| {
        shares.iter().find(|share| share.region == region).map_or(0, |share| share.permille)
    };
    let lost = WHOLE - was.iter().map(|share| share.permille).sum::<u16>();
    let too_much = |share: &Share| share.permille.saturating_sub(of(&target, share.region));
    let to_move: u16 = was.iter().map(too_much).sum();
    let stays = lost == 0 && to_move < WORTH_PERMILLE && fits;
    let mut leaves = if stays { 0 } else { to_move.min(STEP_PERMILLE) };
    let mut comes = lost + leaves;
    let mut row = Vec::with_capacity(was.len() + target.len());
    // What has no part in the target goes first: a region that is drained, one that is far.
    for in_target in [false, true] {
        for share in was.iter().filter(|share| (of(&target, share.region) > 0) == in_target) {
            let less = too_much(share).min(leaves);
            leaves -= less;
            row.push(Share { permille: share.permille - less, ..*share });
        }
    }
    for wanted in &target {
        let there = row.iter_mut().find(|share: &&mut Share| share.region == wanted.region);
        let has = there.as_ref().map_or(0, |share| share.permille);
        let more = wanted.permille.saturating_sub(has).min(comes);
        comes -= more;
        match there {
            Some(share) => share.permille += more,
            None => row.push(Share { permille: more, ..*wanted }),
        }
    }
    row.retain(|share| share.permille > 0);
    for share in &mut row {
        let wanted = target.iter().find(|wanted| wanted.region == share.region);
        share.why = match wanted {
            Some(wanted) if stays && wanted.permille != share.permille => Why::Kept,
            None if stays => Why::Kept,
            Some(wanted) if share.permille <= wanted.permille => wanted.why,
            Some(_) | None => Why::Leaving,
        };
    }
    row.sort_unstable_by_key(|share| share.region);
    debug_assert_eq!(row.iter().map(|share| share.permille).sum::<u16>(), WHOLE);
    row
}

/// A line's target in thousandths, nearest first: rounded down, and what that leaves over to whoever lost most by it.
fn thousandths(target: &[Part]) -> Row {
    // A region that is full has two parts: what it had room for, and its part of what is too much.
    let mut whole = 0;
    let mut parts: Vec<Part> = Vec::with_capacity(target.len());
    for part in target {
        whole += part.tokens;
        match parts.iter_mut().find(|known| known.region == part.region) {
            Some(known) => (known.tokens, known.why) = (known.tokens + part.tokens, part.why),
            None => parts.push(*part),
        }
    }
    let mut lost = Vec::with_capacity(parts.len());
    let mut row: Row = Vec::with_capacity(parts.len());
    for (at, Part { region, tokens, why, .. }) in parts.into_iter().enumerate() {
        let exact = tokens * u64::from(WHOLE);
        let permille = u16::try_from(exact / whole).expect("a thousand at most");
        lost.push((std::cmp::Reverse(exact % whole), at));
        row.push(Share { region, permille, why });
    }
    lost.sort_unstable();
    let over = usize::from(WHOLE - row.iter().map(|share| share.permille).sum::<u16>());
    for (_, at) in lost.into_iter().take(over) {
        row[at].permille += 1;
    }
    row.retain(|share| share.permille > 0);
    row
}
