//! `meridian get usage`: usage of tenants as a table or as CSV.

use crate::cli::GetUsageOptions;
use regions::id::TenantId;
use scheduler_api::paths;
use scheduler_api::usage::{DailyUsageV1, UsageCounts, UsageReportV1, UsageRowV1};

/// Columns, in the order of both formats.
const COLUMNS: [&str; 7] = ["day", "tenant", "deployment", "region", "requests", "inputs", "tokens"];
/// Columns of names; the others are numbers, which the table aligns to the right.
const NAMES: usize = 4;

/// Returns the path and query of the usage of a tenant, or of all, on the chosen days.
pub(super) fn path(options: &GetUsageOptions, tenant: Option<&TenantId>) -> String {
    let GetUsageOptions { from, to, csv: _ } = options;
    let days = [("from", *from), ("to", *to)];
    let days = days.iter().filter_map(|(name, day)| Some(format!("{name}={}", day.as_ref()?)));
    let query = days.chain(tenant.map(|tenant| format!("tenant={tenant}"))).collect::<Vec<_>>().join("&");
    if query.is_empty() { paths::USAGE.to_owned() } else { format!("{}?{query}", paths::USAGE) }
}

/// Formats the rows as CSV with a header (RFC 4180, with newlines as line ends). No name has a comma, a quote or a newline.
pub(super) fn csv(report: &UsageReportV1) -> String {
    let rows = report.rows.iter().map(|daily| cells(daily).join(","));
    std::iter::once(COLUMNS.join(",")).chain(rows).collect::<Vec<_>>().join("\n")
}

/// Formats the rows as a table, with their sum.
pub(super) fn table(report: &UsageReportV1) -> String {
    if report.rows.is_empty() {
        return "no usage in these days".to_owned();
    }
    let mut sum = UsageCounts::default();
    report.rows.iter().for_each(|daily| sum.add(daily.row.counts));
    let mut lines = vec![COLUMNS.map(str::to_owned)];
    lines.extend(report.rows.iter().map(cells));
    lines.push(with_counts(["total", "", "", ""].map(str::to_owned), sum));
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or_default();
    let widths: Vec<_> = (0..COLUMNS.len()).map(width).collect();
    let line = |cells: &[String; 7]| {
        let padded = cells.iter().zip(&widths).enumerate().map(|(at, (cell, width))| {
            if at < NAMES { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        padded.collect::<Vec<_>>().join("  ")
    };
    lines.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn cells(DailyUsageV1 { day, row }: &DailyUsageV1) -> [String; 7] {
    let UsageRowV1 { tenant, deployment, region, counts } = row;
    with_counts([day, tenant, deployment, region].map(Clone::clone), *counts)
}

fn with_counts([day, tenant, deployment, region]: [String; NAMES], counts: UsageCounts) -> [String; 7] {
    let UsageCounts { requests, inputs, tokens } = counts;
    let [requests, inputs, tokens] = [requests, inputs, tokens].map(|count| count.to_string());
    [day, tenant, deployment, region, requests, inputs, tokens]
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_api::VERSION;

    fn report() -> UsageReportV1 {
        let row = |day: &str, tenant: &str, requests| DailyUsageV1 {
            day: day.to_owned(),
            row: UsageRowV1 {
                tenant: tenant.to_owned(),
                deployment: "minilm".to_owned(),
                region: "aws/us-east-1".to_owned(),
                counts: UsageCounts { requests, inputs: 2 * requests, tokens: 10 * requests },
            },
        };
        UsageReportV1 {
            version: VERSION,
            rows: vec![row("2026-11-25", "acme", 99), row("2026-11-26", "b", 1)],
        }
    }

    #[test]
    fn usage_is_formatted_as_a_table_with_a_sum_and_as_csv() {
        let expected = "\
day         tenant  deployment  region         requests  inputs  tokens
2026-11-25  acme    minilm      aws/us-east-1        99     198     990
2026-11-26  b       minilm      aws/us-east-1         1       2      10
total                                               100     200    1000";
        assert_eq!(table(&report()), expected);
        let expected = "\
day,tenant,deployment,region,requests,inputs,tokens
2026-11-25,acme,minilm,aws/us-east-1,99,198,990
2026-11-26,b,minilm,aws/us-east-1,1,2,10";
        assert_eq!(csv(&report()), expected);
        assert_eq!(table(&UsageReportV1 { version: VERSION, rows: Vec::new() }), "no usage in these days");
    }

    #[test]
    fn the_query_has_the_given_days_and_tenant() {
        let options = |from: Option<&str>, to: Option<&str>| {
            let [from, to] = [from, to].map(|day| day.map(|day| day.parse().unwrap()));
            path(&GetUsageOptions { from, to, csv: false }, None)
        };
        let acme = "acme".parse().unwrap();
        let one = GetUsageOptions { from: None, to: None, csv: false };
        assert_eq!(path(&one, Some(&acme)), "/v1/usage?tenant=acme");
        assert_eq!(options(None, None), "/v1/usage");
        assert_eq!(options(None, Some("2026-11-26")), "/v1/usage?to=2026-11-26");
        assert_eq!(
            options(Some("2026-11-01"), Some("2026-11-26")),
            "/v1/usage?from=2026-11-01&to=2026-11-26"
        );
    }
}
