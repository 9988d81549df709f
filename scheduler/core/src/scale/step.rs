//! From a number to replicas: who is kept after all, how many are ordered, who goes.
//!
//! Up: those that are on their way out come back first, because they are warm; the rest is ordered. Down: those that are
//! not ready yet go first, as they have nothing to finish; then those with the least in flight, the youngest of them first,
//! so that the same ones stay and stay warm. Where who goes is not ours to choose (a StatefulSet takes its highest ordinal),
//! [`Own::rank`] says so and comes before everything else.
//!
//! Where some run what is not deployed any longer ([`Own::stale`]), others are ordered in their place, a quarter more than are
//! wanted at a time, and a stale one goes for each that takes work: never fewer take work than are wanted. How many are
//! wanted meanwhile is decided as ever; who comes is never stale.
//!
//! Who is lost, frozen or unreachable, is replaced at once and let go only after a while ([`LOST_MAX`]): a replica that is
//! starved of its processor for a moment comes back, and a death is noticed by whoever started it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::spoke::Standing;

/// A replica that was lost for so long is let go: ten times what its spoke takes for frozen.
pub const LOST_MAX: Duration = Duration::from_secs(30);

/// Beside those that are wanted so many may run while they replace others.
const SURGE_PERCENT: u32 = 25;

/// A replica that was started here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Own<I> {
    /// By which whoever started it knows it.
    pub id: I,
    /// Where who goes is not ours to choose: the highest go first.
    pub rank: u64,
    /// What it runs is not what is deployed now.
    pub stale: bool,
    /// When it was ordered.
    pub since: Instant,
    /// How it stands.
    pub standing: Standing,
    /// Since when it has been lost; also when it goes for that.
    pub lost: Option<Instant>,
    /// Requests that were sent to it and have not ended.
    pub in_flight: u32,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step<I> {
    /// Let go until now, and stays.
    pub keep: BTreeSet<I>,
    /// Goes, once it has finished what it has.
    pub let_go: BTreeSet<I>,
    /// So many are ordered.
    pub order: u32,
}

/// What is to be done so that there are `wanted`, `others` of which are not ours: a spoke's file names them.
pub fn step<I: Clone + Ord>(own: &[Own<I>], others: u32, wanted: u32, now: Instant) -> Step<I> {
    let mut step = Step { keep: BTreeSet::new(), let_go: BTreeSet::new(), order: 0 };
    let lost_for_good = |replica: &&Own<I>| {
        let long = |since: Instant| now.saturating_duration_since(since) >= LOST_MAX;
        replica.standing == Standing::Lost && replica.lost.is_some_and(long)
    };
    step.let_go.extend(own.iter().filter(lost_for_good).map(|replica| replica.id.clone()));
    let there = |replica: &&Own<I>| match replica.standing {
        Standing::Unheard | Standing::Serving => true,
        Standing::Lost | Standing::Leaving => false,
    };
    let serving = |replica: &&Own<I>| replica.standing == Standing::Serving;
    let all = others.saturating_add(own.iter().filter(there).count() as u32);
    let stale = own.iter().filter(there).filter(|it| it.stale).count() as u32;
    let fresh = all - stale;
    if wanted >= fresh {
        let back = |it: &&Own<I>| it.standing == Standing::Leaving && !it.stale && it.lost.is_none();
        let mut leaving: Vec<_> = own.iter().filter(back).collect();
        // The lowest rank first: whoever goes is taken from the top.
        leaving.sort_by_key(|it| (it.rank, it.since, it.id.clone()));
        let missing = wanted - fresh;
        step.keep.extend(leaving.into_iter().take(missing as usize).map(|it| it.id.clone()));
        let missing = missing - step.keep.len() as u32;
        // Beside those that they replace there is room for a few only.
        let surge = if stale == 0 { missing } else { (wanted * SURGE_PERCENT).div_ceil(100).max(1) };
        let room = wanted.saturating_add(surge).saturating_sub(all + step.keep.len() as u32);
        step.order = missing.min(room);
    }
    let over = if stale == 0 {
        all.saturating_sub(wanted)
    } else {
        // Whoever replaces a stale one counts from when it takes work.
        let unready = own.iter().filter(|it| it.standing == Standing::Unheard && !it.stale).count() as u32;
        all.saturating_sub(unready).saturating_sub(wanted).max(fresh.saturating_sub(wanted))
    };
    let mut candidates: Vec<_> = own.iter().filter(there).collect();
    candidates.sort_by_key(|it| {
        let youngest = std::cmp::Reverse((it.since, it.id.clone()));
        (!it.stale, std::cmp::Reverse(it.rank), serving(it), it.in_flight, youngest)
    });
    step.let_go.extend(candidates.into_iter().take(over as usize).map(|it| it.id.clone()));
    step
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;

    fn own(id: u32, standing: Standing, in_flight: u32, now: Instant) -> Own<u32> {
        let lost = (standing == Standing::Lost).then_some(now);
        Own {
            id,
            rank: 0,
            stale: false,
            since: now + Duration::from_secs(u64::from(id)),
            standing,
            lost,
            in_flight,
        }
    }

    /// `own` are (standing, in flight), numbered from 1, which is also their age; the answer is kept, let go, ordered.
    #[track_caller]
    fn check(replicas: &[(Standing, u32)], others: u32, wanted: u32, expected: (&[u32], &[u32], u32)) {
        let now = some_instant();
        let numbered = (1..).zip(replicas);
        let all: Vec<_> = numbered.map(|(id, (standing, busy))| own(id, *standing, *busy, now)).collect();
        let Step { keep, let_go, order } = step(&all, others, wanted, now);
        let (keep, let_go): (Vec<_>, Vec<_>) = (keep.into_iter().collect(), let_go.into_iter().collect());
        assert_eq!((&keep[..], &let_go[..], order), expected);
    }

    use Standing::{Leaving, Lost, Serving, Unheard};

    #[test]
    fn who_is_on_the_way_out_comes_back_before_another_is_ordered() {
        check(&[], 0, 3, (&[], &[], 3));
        check(&[(Serving, 0)], 1, 3, (&[], &[], 1));
        check(&[(Serving, 0), (Leaving, 2), (Leaving, 0)], 0, 2, (&[2], &[], 0));
        check(&[(Serving, 0), (Leaving, 2), (Leaving, 0)], 0, 5, (&[2, 3], &[], 2));
        check(&[(Serving, 0), (Leaving, 2)], 0, 1, (&[], &[], 0));
    }

    #[test]
    fn first_goes_who_is_not_ready_then_who_has_least_then_the_youngest() {
        let all = [(Serving, 5), (Serving, 0), (Serving, 0), (Unheard, 0), (Unheard, 0)];
        check(&all, 0, 4, (&[], &[5], 0));
        check(&all, 0, 3, (&[], &[4, 5], 0));
        check(&all, 0, 2, (&[], &[3, 4, 5], 0));
        check(&all, 0, 1, (&[], &[2, 3, 4, 5], 0));
        check(&all, 0, 0, (&[], &[1, 2, 3, 4, 5], 0));
        check(&all[..1], 2, 1, (&[], &[1], 0));
    }

    #[test]
    fn who_is_lost_is_replaced_at_once_and_let_go_after_a_while() {
        check(&[(Serving, 0), (Lost, 3)], 0, 2, (&[], &[], 1));
        let now = some_instant();
        let lost = [own(1, Lost, 3, now)];
        assert!(step(&lost, 0, 1, now + LOST_MAX - Duration::from_millis(1)).let_go.is_empty());
        let after = step(&lost, 0, 1, now + LOST_MAX);
        assert_eq!((after.let_go, after.order), (BTreeSet::from([1]), 1));
        let goes = [Own { standing: Leaving, ..lost[0].clone() }];
        let more = step(&goes, 0, 2, now);
        assert!(more.keep.is_empty() && more.order == 2, "who goes for that is of no use");
    }

    #[test]
    fn where_who_goes_is_not_ours_to_choose_the_highest_goes_however_busy() {
        let now = some_instant();
        let ranked: Vec<_> =
            (0..3).map(|id| Own { rank: u64::from(id), ..own(id, Serving, id * 10, now) }).collect();
        assert_eq!(step(&ranked, 0, 1, now).let_go, BTreeSet::from([1, 2]));
        let leaving: Vec<_> = ranked.iter().map(|it| Own { standing: Leaving, ..it.clone() }).collect();
        assert_eq!(step(&leaving, 0, 2, now).keep, BTreeSet::from([0, 1]), "the lowest stay");
    }

    /// From so many that are stale to as many as are `wanted` of what is deployed now, in a world where each look finds ready
    /// what the look before it has ordered: how many looks that takes.
    #[track_caller]
    fn rolls_out(stale: u32, wanted: u32) -> u32 {
        let now = some_instant();
        let mut all: Vec<_> = (0..stale).map(|id| Own { stale: true, ..own(id, Serving, 0, now) }).collect();
        let (mut next, mut looks) = (stale, 0);
        while all.iter().any(|it| it.stale) || all.len() as u32 != wanted {
            looks += 1;
            assert!(looks < 500, "it comes to no end: {all:?}");
            let Step { keep, let_go, order } = step(&all, 0, wanted, now);
            assert!(keep.is_empty());
            all.retain(|it| !let_go.contains(&it.id));
            let serving = all.iter().filter(|it| it.standing == Serving).count() as u32;
            assert!(serving >= wanted.min(stale), "{serving} of {wanted} take work");
            all.iter_mut().for_each(|it| it.standing = Serving);
            all.extend((0..order).map(|more| own(next + more, Unheard, 0, now)));
            next += order;
            let most = (wanted + (wanted * SURGE_PERCENT).div_ceil(100).max(1)).max(stale);
            assert!(all.len() as u32 <= most, "{} run where {wanted} are wanted", all.len());
        }
        looks
    }

    #[test]
    fn what_is_not_deployed_any_longer_is_replaced_without_a_gap() {
        for (stale, wanted) in [(1, 1), (4, 4), (40, 40), (2, 8), (8, 2), (3, 0)] {
            let looks = rolls_out(stale, wanted);
            assert!(looks <= 20, "{stale} to {wanted} took {looks} looks");
        }
    }

    proptest! {
        /// Whoever there is, and whatever is wanted: afterwards there are as many as are wanted, but for those that are not
        /// ours; nobody is kept and let go; and nobody who serves goes while one who does not is kept.
        #[test]
        fn afterwards_there_are_as_many_as_are_wanted(
            replicas in prop::collection::vec((0usize..4, 0u32..5, 0u64..3), 0..12),
            others in 0u32..4,
            wanted in 0u32..16,
        ) {
            let now = some_instant();
            let all: Vec<_> = (0..).zip(replicas).map(|(id, (standing, busy, rank))| {
                Own { rank, ..own(id, [Unheard, Serving, Lost, Leaving][standing], busy, now) }
            }).collect();
            let Step { keep, let_go, order } = step(&all, others, wanted, now);
            prop_assert!(keep.is_disjoint(&let_go));
            let there = all.iter().filter(|it| matches!(it.standing, Unheard | Serving)).count() as u32;
            let after = others + there + keep.len() as u32 + order - let_go.len() as u32;
            prop_assert_eq!(after, wanted.max(others), "nobody is lost for long here");
        }
    }
}
