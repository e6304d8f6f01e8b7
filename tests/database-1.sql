-- A database as the first version of the schema made it, with the row of measurement.json.
BEGIN TRANSACTION;
CREATE TABLE kernelcat_measurements (
	id INTEGER NOT NULL,
	digest VARCHAR(32) NOT NULL,
	entry VARCHAR(64) NOT NULL,
	language VARCHAR(64) NOT NULL,
	variant VARCHAR(64) NOT NULL,
	problem TEXT NOT NULL,
	problem_name VARCHAR(128),
	config TEXT NOT NULL,
	source VARCHAR(128) NOT NULL,
	gpu VARCHAR(64) NOT NULL,
	environment TEXT NOT NULL,
	regime VARCHAR(16) NOT NULL,
	l2 VARCHAR(64) NOT NULL,
	state VARCHAR(64) NOT NULL,
	run VARCHAR(64) NOT NULL,
	kind VARCHAR(16) NOT NULL,
	status VARCHAR(16) NOT NULL,
	median_us FLOAT,
	ci_low_us FLOAT,
	ci_high_us FLOAT,
	samples BIGINT NOT NULL,
	sm_clock_mhz FLOAT,
	power_w FLOAT,
	temperature_c FLOAT,
	max_error FLOAT,
	created_at VARCHAR(32) NOT NULL,
	detail TEXT,
	PRIMARY KEY (id),
	UNIQUE (digest)
);
INSERT INTO "kernelcat_measurements" VALUES(1,'d4269374092236f464b6a09dc05f9dd8','gemm','cuda','wgmma','{"K":4096,"M":4096,"N":4096,"activation":"none","bias":false,"dtype":"bfloat16","residual":false}','4096x4096x4096','{"BLOCK_M":128,"BLOCK_N":256,"persistent":true}','0123456789abcdef','h200','{"compilers":{"nvrtc":"13.0.88"},"driver":"580.95.05","sku":"h200"}','graph','cold','sustained','20261120T093012-5f0c','measured','passed',180.0,179.5,180.5,200,1500.0,698.5,61.0,0.001953125,'2026-11-20T09:30:12.000Z',NULL);
CREATE TABLE kernelcat_schema (
	version INTEGER NOT NULL
);
INSERT INTO "kernelcat_schema" VALUES(1);
CREATE INDEX kernelcat_by_run ON kernelcat_measurements (run, entry);
CREATE INDEX kernelcat_by_entry ON kernelcat_measurements (entry, gpu, regime, status);
CREATE INDEX kernelcat_by_source ON kernelcat_measurements (source, entry, language, variant, gpu);
COMMIT;
