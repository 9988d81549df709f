//! Weights of the hub's traffic plan at this gateway, found without a search and without an allocation.
//!
//! A row belongs to a deployment, an origin and a policy. A request uses the row of its own policy, and where its
//! policy is narrower than any row's (its header narrows its residency in a new way), the row of the narrowest policy
//! that contains its own: the draw leaves out the regions that may not see it, as everywhere.
//!
//! A row divides tokens, without a distinction by priority. Which requests go far is decided here: its shares are
//! ordered by distance from the origin, and interactive requests draw from the nearer part, as large as their share of
//! the demand, and bulk from the rest ([`throw`]). Together they are divided as the row says; so a backfill that fills
//! the nearest region is itself sent farther, and interactive requests stay near.
//!
//! See [`regions::weights`] for the draw and its place in region selection.

use crate::circuit::Permille;
use regions::catalogue::Catalogue;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::route::Generation;
use regions::set::{RegionIndex, RegionSet};
use regions::weights::Share;
use replica_api::priority::Priority;
use std::collections::BTreeMap;

/// Rows of one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanWeights {
    /// Generation of the plan.
    pub generation: Generation,
    rows: BTreeMap<DeploymentName, Vec<Row>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    origin: RegionIndex,
    allowed: RegionSet,
    shares: Box<[Share]>,
}

/// Row as received: deployment, policy, origin and shares.
pub type ReceivedRow = (DeploymentName, ResidencyPolicy, RegionIndex, Box<[Share]>);

impl PlanWeights {
    /// Makes weights from these rows, with their policies resolved to regions.
    pub fn new(
        generation: Generation,
        rows_received: impl IntoIterator<Item = ReceivedRow>,
        catalogue: &Catalogue,
    ) -> PlanWeights {
        let mut rows: BTreeMap<DeploymentName, Vec<Row>> = BTreeMap::new();
        for (deployment, residency, origin, mut shares) in rows_received {
            let from = catalogue.region(origin).point;
            let distance = |share: &Share| catalogue.region(share.region).point.distance_km(from);
            shares.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
            let row = Row { origin, allowed: residency.permitted(catalogue), shares };
            rows.entry(deployment).or_default().push(row);
        }
        // The narrowest first, so that the first that contains a policy is the narrowest that does.
        rows.values_mut().for_each(|rows| rows.sort_by_key(|row| row.allowed.len()));
        PlanWeights { generation, rows }
    }

    /// Returns the shares of requests for `deployment` from `origin` that may go to `allowed`, nearest first; empty if
    /// the plan has none.
    pub fn of(&self, deployment: &DeploymentName, origin: RegionIndex, allowed: &RegionSet) -> &[Share] {
        let rows = self.rows.get(deployment).map_or(&[][..], Vec::as_slice);
        let row = rows.iter().find(|row| row.origin == origin && allowed.is_subset(&row.allowed));
        row.map_or(&[], |row| &row.shares)
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows.values().map(Vec::len).sum()
    }
}

/// Maps a random draw to a position among the shares of a row for a request of this priority, where `interactive_share`
/// is the interactive part of the demand; without it the priority has no effect. Every value of `draw_value` from 0 to
/// 999 is equally likely.
pub fn throw(priority: Priority, interactive_share: Option<Permille>, draw_value: Permille) -> u16 {
    let total = u32::from(Permille::ALL.get());
    let (from, to) = match (interactive_share.map(|share| u32::from(share.get())), priority) {
        (None, _) => (0, total),
        (Some(share), Priority::Interactive) => (0, share),
        (Some(share), Priority::Bulk) => (share, total),
    };
    let position = from + u32::from(draw_value.get().min(999)) * (to - from) / total;
    u16::try_from(position.min(total - 1)).expect("less than a thousand")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use regions::weights::{ShareReason, draw};

    #[test]
    fn a_request_uses_the_row_of_the_narrowest_policy_that_contains_its_own() {
        let catalogue = Catalogue::builtin();
        let at = |id: &str| catalogue.index_of(&id.parse().unwrap()).unwrap();
        let (america, europe, tokyo) = (at("aws/us-east-1"), at("gcp/europe-west4"), at("oci/ap-tokyo-1"));
        let name = |text: &str| text.parse::<DeploymentName>().unwrap();
        let policy = |text: &str| text.parse::<ResidencyPolicy>().unwrap();
        let to = |region| [Share { region, permille: 1000, reason: ShareReason::Nearest }];
        let row = |deployment: &str, residency: &str, origin, region| -> ReceivedRow {
            (name(deployment), policy(residency), origin, Box::new(to(region)))
        };
        let rows_received = [
            row("d", "anywhere", america, america),
            row("d", "eu", america, europe),
            row("d", "anywhere", tokyo, tokyo),
        ];
        let weights = PlanWeights::new(Generation { epoch: 1, number: 7 }, rows_received, &catalogue);
        let find = |deployment: &str, origin, residency: &str| {
            weights.of(&name(deployment), origin, &policy(residency).permitted(&catalogue)).to_vec()
        };
        assert_eq!(find("d", america, "anywhere"), to(america));
        assert_eq!(find("d", america, "eu"), to(europe));
        assert_eq!(find("d", america, "de,fr"), to(europe), "a policy of its own within the narrower");
        assert_eq!(find("d", america, "us"), to(america));
        assert_eq!(find("d", tokyo, "eu"), to(tokyo));
        assert_eq!(find("d", europe, "eu"), []);
        assert_eq!(find("e", america, "eu"), []);
        assert_eq!(weights.rows(), 3);
    }

    #[test]
    fn shares_are_ordered_by_distance_from_the_origin() {
        let catalogue = Catalogue::builtin();
        let at = |id: &str| catalogue.index_of(&id.parse().unwrap()).unwrap();
        let regions = ["oci/ap-tokyo-1", "aws/us-east-1", "gcp/europe-west4", "aws/eu-central-1"].map(at);
        let shares = regions.map(|region| Share { region, permille: 250, reason: ShareReason::NearerFull });
        let rows_received: [ReceivedRow; 2] = [at("aws/eu-central-1"), at("oci/ap-tokyo-1")].map(|origin| {
            ("d".parse().unwrap(), ResidencyPolicy::Anywhere, origin, Box::new(shares) as Box<[Share]>)
        });
        let weights = PlanWeights::new(Generation { epoch: 1, number: 1 }, rows_received, &catalogue);
        let order = |origin: &str| -> Vec<String> {
            let shares = weights.of(&"d".parse().unwrap(), at(origin), &catalogue.all());
            shares.iter().map(|share| catalogue.region(share.region).id.to_string()).collect()
        };
        let europe = ["aws/eu-central-1", "gcp/europe-west4", "aws/us-east-1", "oci/ap-tokyo-1"];
        assert_eq!(order("aws/eu-central-1"), europe);
        let asia = ["oci/ap-tokyo-1", "gcp/europe-west4", "aws/eu-central-1", "aws/us-east-1"];
        assert_eq!(order("oci/ap-tokyo-1"), asia);
    }

    /// Returns how often each region of a row is drawn by requests of a priority, of a thousand.
    fn drawn(
        shares: &[Share],
        priority: Priority,
        interactive_share: Option<Permille>,
    ) -> BTreeMap<usize, u32> {
        let mut counts = BTreeMap::new();
        for draw_value in 0..1000 {
            let position = throw(priority, interactive_share, Permille::new(draw_value));
            let region = draw(shares, |_| true, position).unwrap();
            *counts.entry(region.as_usize()).or_default() += 1;
        }
        counts
    }

    fn row(permilles: &[u16]) -> Vec<Share> {
        let share = |(region, permille): (usize, &u16)| Share {
            region: RegionIndex::new(region).unwrap(),
            permille: *permille,
            reason: ShareReason::NearerFull,
        };
        permilles.iter().enumerate().map(share).collect()
    }

    #[test]
    fn bulk_goes_far_and_interactive_requests_stay_near() {
        let (half_away, share) = (row(&[500, 500]), Some(Permille::new(100)));
        assert_eq!(drawn(&half_away, Priority::Interactive, share), [(0, 1000)].into());
        assert_eq!(drawn(&half_away, Priority::Bulk, share)[&1], 555, "half of all, by nine tenths of all");
        // More interactive requests than the nearest region takes are sent farther as well, and no bulk stays.
        let (little, many) = (row(&[300, 700]), Some(Permille::new(600)));
        assert_eq!(drawn(&little, Priority::Interactive, many), [(0, 500), (1, 500)].into());
        assert_eq!(drawn(&little, Priority::Bulk, many), [(1, 1000)].into());
        // Without a report yet, and with one priority only.
        for priority in [Priority::Interactive, Priority::Bulk] {
            assert_eq!(drawn(&half_away, priority, None), [(0, 500), (1, 500)].into());
        }
        assert_eq!(
            drawn(&half_away, Priority::Interactive, Some(Permille::ALL)),
            [(0, 500), (1, 500)].into()
        );
        assert_eq!(drawn(&half_away, Priority::Bulk, Some(Permille::new(0))), [(0, 500), (1, 500)].into());
    }

    proptest! {
        /// For any shares of the priorities, each region gets its share of all tokens.
        #[test]
        fn priorities_together_are_divided_as_the_row_says(
            cuts in prop::collection::btree_set(1..1000u16, 0..5),
            interactive_share in 0..=1000u16,
        ) {
            let mut permilles = Vec::new();
            let mut last = 0;
            for cut in cuts.into_iter().chain([1000]) {
                permilles.push(cut - last);
                last = cut;
            }
            let shares = row(&permilles);
            let share = Some(Permille::new(interactive_share));
            let of = |priority| drawn(&shares, priority, share);
            let (interactive, bulk) = (of(Priority::Interactive), of(Priority::Bulk));
            for (region, permille) in permilles.iter().enumerate() {
                let times = |counts: &BTreeMap<usize, u32>| counts.get(&region).copied().unwrap_or(0);
                let (near, far) = (u32::from(interactive_share), 1000 - u32::from(interactive_share));
                let got = (times(&interactive) * near + times(&bulk) * far) / 1000;
                prop_assert!(got.abs_diff(u32::from(*permille)) <= 2, "{region}: {got} of {permille}");
            }
        }
    }
}
