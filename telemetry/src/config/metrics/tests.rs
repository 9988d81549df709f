use super::*;
use crate::config::ExportCompression;
use configuration::Problem;
use std::path::Path;

section! {
    /// File of a role.
    partial struct RoleFile {
        /// Metrics.
        metrics: MetricsSection;
    }
}

fn read(text: &str, variables: &[(&str, &str)]) -> Result<Option<MetricsConfig>, String> {
    let environment = variables.iter().copied().collect();
    let files = Files { base: Path::new("."), environment: Some(&environment) };
    let read =
        ConfigFile::read(text, |document| document.section::<RoleFile>()?.metrics?.read(document, &files));
    read.map_err(|found: Vec<Problem>| found.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

const GENERAL: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const OWN: &str = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT";
const FILE: &str = "[metrics]\nendpoint = \"http://a\"\n";

#[test]
fn metrics_have_their_own_section_and_variables() {
    let endpoint = |text: &str, variables: &[(&str, &str)]| {
        read(text, variables).unwrap().map(|config| config.collector.endpoint.to_string())
    };
    assert_eq!(endpoint("", &[]), None);
    assert_eq!(endpoint("", &[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://a")]), None);
    assert_eq!(endpoint("", &[(GENERAL, "http://a:4318")]).as_deref(), Some("http://a:4318/v1/metrics"));
    assert_eq!(endpoint("", &[(OWN, "http://a/x"), (GENERAL, "http://b")]).as_deref(), Some("http://a/x"));
    let grpc = [(GENERAL, "http://a:4317"), ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc")];
    assert_eq!(endpoint("", &grpc).as_deref(), Some("http://a:4317/"));
    assert_eq!(endpoint(FILE, &[(GENERAL, "http://b")]).as_deref(), Some("http://a/v1/metrics"));
    for off in [
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_METRICS_EXPORTER", "none"),
        ("OTEL_METRICS_EXPORTER", "prometheus"),
    ] {
        assert_eq!(endpoint(FILE, &[off]), None, "{off:?}");
    }
    assert!(endpoint(FILE, &[("OTEL_METRICS_EXPORTER", "otlp"), ("OTEL_LOGS_EXPORTER", "none")]).is_some());
}

#[test]
fn the_interval_is_that_of_the_file_or_of_the_variable_or_a_minute() {
    let variable = "OTEL_METRIC_EXPORT_INTERVAL";
    let interval = |text: &str, variables: &[(&str, &str)]| read(text, variables).unwrap().unwrap().interval;
    assert_eq!(interval(FILE, &[]), Duration::from_secs(60));
    assert_eq!(interval(FILE, &[(variable, "1000")]), Duration::from_secs(1), "at the limit");
    assert_eq!(interval(FILE, &[(variable, "3600000")]), Duration::from_secs(3600), "at the limit");
    let of_file = format!("{FILE}interval = \"15s\"\ntimeout = \"2s\"");
    let config = read(&of_file, &[(variable, "5000"), ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "9000")]);
    let config = config.unwrap().unwrap();
    assert_eq!(
        (config.interval, config.collector.timeout),
        (Duration::from_secs(15), Duration::from_secs(2))
    );
    for text in ["999", "3600001", "1s", "-1"] {
        let problem = read(FILE, &[(variable, text)]).map(|_| ()).expect_err(text);
        assert!(problem.contains(variable) && problem.contains("1000 to 3600000"), "{problem}");
    }
    for text in ["999ms", "3601s"] {
        let problem = read(&format!("{FILE}interval = \"{text}\""), &[]).map(|_| ()).expect_err(text);
        assert!(problem.contains("metrics.interval"), "{problem}");
    }
}

#[test]
fn headers_of_the_variable_are_added_to_those_of_the_file_and_are_not_shown() {
    let text = format!("{FILE}headers_env = \"COLLECTOR\"");
    let variables = [
        ("COLLECTOR", "api-key=s3cret-of-the-file"),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "x=s3cret%20own"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "y=general"),
    ];
    let config = read(&text, &variables).unwrap().unwrap();
    let headers = &config.collector.headers.0;
    let texts: Vec<_> =
        headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    assert_eq!(texts, [("api-key", "s3cret-of-the-file"), ("x", "s3cret own")]);
    assert!(!format!("{config:?}").contains("s3cret"));
}

#[test]
fn an_invalid_value_of_metrics_is_reported_with_its_key_or_variable() {
    let problem = |text: &str, variable: (&str, &str)| {
        read(text, &[(GENERAL, "http://a"), variable]).map(|_| ()).unwrap_err()
    };
    for (text, part) in [
        ("[metrics]\nendpoint = \"collector:4318\"", "metrics.endpoint"),
        ("[metrics]\nprotocol = \"http/json\"", "metrics.protocol"),
        ("[metrics]\nca = \"missing.pem\"", "metrics.ca"),
        ("[metrics]\nheaders_env = \"MISSING\"", "metrics.headers_env"),
        ("[metrics]\ntimeout = \"2m\"", "metrics.timeout"),
    ] {
        let problem = problem(text, ("A", "b"));
        assert!(problem.contains(part), "{part} in {problem}");
    }
    for (variable, value, part) in [
        (OWN, "ftp://a", "\"ftp://a\""),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "x", "1 to 60000"),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "s3cret", "entry 1"),
        ("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE", "missing.pem", "missing.pem"),
        ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "zstd", "\"gzip\" or \"none\""),
        ("OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY", "key.pem", "not supported"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta", "\"cumulative\""),
        ("OTEL_METRICS_EXPORTER", "console", "\"otlp\" or \"none\""),
    ] {
        let problem = problem("", (variable, value));
        assert!(problem.contains(variable) && problem.contains(part), "{problem}");
        assert!(!problem.contains("s3cret"), "{problem}");
    }
    let gzip = [("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")];
    assert_eq!(read(FILE, &gzip).unwrap().unwrap().collector.compression, ExportCompression::Gzip);
}

/// Regression: the variables of other processes of the machine prevented the start.
#[test]
fn an_invalid_variable_is_reported_only_where_metrics_are_exported() {
    for variable in [
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "500"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "x"),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "s3cret"),
    ] {
        assert!(read("", &[variable]).unwrap().is_none(), "{variable:?} without an endpoint");
        for off in [
            ("OTEL_SDK_DISABLED", "true"),
            ("OTEL_METRICS_EXPORTER", "none"),
            ("OTEL_METRICS_EXPORTER", "prometheus"),
        ] {
            assert!(read(FILE, &[variable, off]).unwrap().is_none(), "{variable:?} with {off:?}");
        }
        for problem in [read(FILE, &[variable]), read("", &[(GENERAL, "http://a"), variable])] {
            assert!(problem.unwrap_err().contains(variable.0), "{variable:?}");
        }
    }
}
